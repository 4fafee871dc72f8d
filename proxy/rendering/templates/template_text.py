"""Writes conversations as text with one chat template: with minijinja if its text equals jinja2's, else with jinja2.

minijinja is used for a template only if it wrote the same text as jinja2 for every probe at start-up, and for a
conversation only if both engines write all its values alike. So the text always equals jinja2's, and transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from proxy.rendering.templates.engine_probes import engine_probes
from proxy.rendering.templates.jinja2_template import compile_jinja2
from proxy.rendering.templates.minijinja_template import WriteFast, compile_minijinja
from tokengrove.errors import ConfigurationError

# The exceptions of a template that cannot express a conversation.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)


class TemplateText:
    """One compiled chat template. Thread-safe. `engine`: the engine that writes the text, and why.

    `special`: the special tokens by name (`bos_token`, ...), which templates read. Raises ConfigurationError if the
    template is not valid Jinja.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._special = special
        try:
            self._jinja2 = compile_jinja2(source)
        except TemplateError as error:
            raise ConfigurationError(f"the chat template is not valid: {error}") from error
        except (RecursionError, SyntaxError, MemoryError):  # from jinja2, or from Python for the code that jinja2 makes
            raise ConfigurationError("the chat template is nested too deeply") from None
        self._minijinja: WriteFast | None = None
        try:
            fast = compile_minijinja(source, self._jinja2.environment.parse(source))
            self._minijinja = self._checked(fast)
            self.engine = "minijinja (same text as jinja2 in the self-check)"
        except ValueError as error:
            self.engine = f"jinja2 (minijinja {error})"

    def write(self, given: Mapping[str, Any]) -> str:
        """Return the text for these variables (`messages`, `tools`, ...). Raises one of REFUSALS."""
        context = {**self._special, **given}
        text = None if self._minijinja is None else self._minijinja(context)
        return self._jinja2.render(context) if text is None else text

    def _checked(self, fast: WriteFast) -> WriteFast:
        """Return `fast`, or `fast` without variables that are None: some templates test whether `tools` is defined.

        Raises ValueError if each writes other text than jinja2 for a probe, or does not write the first probe.
        """
        probes = [(name, {**self._special, **given}) for name, given in engine_probes()]
        wanted = [(name, context, self._by_jinja2(context)) for name, context in probes]
        for write in (fast, _without_none(fast)):
            unlike = next(_unlike(write, wanted), None)
            if unlike is None:
                return write
        raise ValueError(f"wrote other text in the self-check: {unlike}")

    def _by_jinja2(self, context: Mapping[str, Any]) -> str | None:
        try:
            return self._jinja2.render(context)
        except REFUSALS:
            return None


@lru_cache(maxsize=16)
def compiled(source: str, special: frozenset[tuple[str, str]]) -> TemplateText:
    """The compiled template, shared: models of one family have the same one, and its self-check takes 20 ms.

    `special`: names and texts of special tokens. Raises ConfigurationError like TemplateText.
    """
    return TemplateText(source, dict(special))


def _unlike(write: WriteFast, wanted: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> Iterator[str]:
    """Yield the names of probes with other text than `wanted`. Only the first probe must be written at all."""
    for at, (name, context, right) in enumerate(wanted):
        text = write(context)
        if text != right and (text is not None or at == 0):
            yield name


def _without_none(write: WriteFast) -> WriteFast:
    def write_without(context: Mapping[str, Any]) -> str | None:
        absent = [name for name in ("tools", "documents") if name in context and context[name] is None]
        return write({name: value for name, value in context.items() if name not in absent})

    return write_without
