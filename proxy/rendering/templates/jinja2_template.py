"""Compiles chat templates with jinja2, with the settings of transformers' `apply_chat_template`.

These settings are part of the format: models are trained on the resulting text. transformers is not imported.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def compile_jinja2(source: str) -> Template:
    """Compile a chat template. Raises jinja2's TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment.from_string(source)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Unlike jinja2's own, it escapes neither HTML nor non-ASCII letters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    """The function `strftime_now`: the local date and time in this format."""
    return datetime.now().strftime(format)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _GenerationBlock(Extension):
    """The block `generation`, which marks the model's output for training masks; here it only limits assignments."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """Replaces `dict`, without the attributes of a class, through which templates could leave the sandbox."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without private attributes, through which templates could leave the sandbox."""

    def __init__(*args: Any, **items: Any) -> None:
        self, *given = args
        attributes = dict(*given, **items)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template must not set the private attribute {name!r} of a namespace")
