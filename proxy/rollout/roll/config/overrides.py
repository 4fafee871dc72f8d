"""Changes of a configuration as hydra's command line writes them: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from proxy.errors import InvalidRequest
from proxy.rollout.roll.config.yaml_text import parse_yaml

_NAMES = {"true": True, "false": False, "null": None}
_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?(?:inf|nan)$", re.IGNORECASE
)
_UNSPACED = re.compile(r"""((?:^|[{,])\s*(?:[\w.-]+|'[^']*'|"[^"]*")):(?=\S)""")

_UNQUOTED = re.compile(r"""(?<![\w'"])\$\{[^{}'"]*\}(?![\w'"])""")
"""An interpolation as an element; YAML would read its brace as a mapping."""


@dataclass(frozen=True)
class Override:
    """`sign` is "", "+" (add), "++" (add or change) or "~" (delete). `value` is None of `~a.b`."""

    text: str
    sign: str
    path: tuple[str, ...]
    value: Any

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises InvalidRequest for a text of another form."""
        match = re.fullmatch(r"(\+\+|\+|~)?([^=\s]+?)(?:=(.*))?", text.strip(), re.DOTALL)
        if match is None or (match[3] is None and match[1] != "~"):
            raise InvalidRequest(f"the override {text!r} must be a.b=value, +a.b=value, ++a.b=value or ~a.b")
        value = None if match[3] is None else _value(match[3].strip(), text)
        return cls(text, match[1] or "", tuple(match[2].split(".")), value)

    def apply(self, values: dict[str, Any], known: Callable[[tuple[str, ...]], bool]) -> None:
        """Change `values`. `known`: whether a path is a setting that the files may have left out.

        Raises InvalidRequest for a path that does not exist and is not `known`, unless the sign adds it.
        """
        section = self._section(values, create=self.sign in ("+", "++") or known(self.path))
        name = _key(section, self.path[-1])
        if self.sign == "~":
            if name not in section:
                raise self._unknown(section, self.path[-1])
            del section[name]
        elif name not in section and not self.sign and not known(self.path):
            raise self._unknown(section, self.path[-1])
        elif self.sign == "+" and name in section:
            raise InvalidRequest(f"the override {self.text!r} adds what is there already; leave the + out, or write ++")
        else:
            section[name] = self.value

    def _section(self, values: dict[str, Any], *, create: bool) -> dict[str, Any]:
        section = values
        for at, name in enumerate(self.path[:-1]):
            key = _key(section, name)
            if section.get(key) is None and create:
                section[key] = {}
            if key not in section:
                raise self._unknown(section, name)
            below = section[key]
            if not isinstance(below, dict):
                raise self._no_section(below, ".".join(self.path[: at + 1]), ".".join(self.path[at + 1 :]))
            section = below
        return section

    def _no_section(self, value: Any, path: str, rest: str) -> InvalidRequest:
        referred = re.fullmatch(r"\$\{([\w.]+)\}", value.strip()) if isinstance(value, str) else None
        way = f"; change it there: {self.sign}{referred[1]}.{rest}=..." if referred else ""
        return InvalidRequest(
            f"the override {self.text!r} needs a section at {path}, which is {value!r}{way}", param=path
        )

    def _unknown(self, section: Mapping[str, Any], name: str) -> InvalidRequest:
        near = get_close_matches(name, [str(each) for each in section], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        way = "" if self.sign == "~" else f"; to add it, write +{self.text.lstrip('+')}"
        path = ".".join(self.path)
        return InvalidRequest(f"the override {self.text!r}: the configuration has no {name!r}{hint}{way}", param=path)


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Raises InvalidRequest for a text that is no override, and for one text instead of a list of them."""
    if isinstance(texts, str):
        raise InvalidRequest(f"overrides is a list of texts, such as [{texts!r}]")
    return [Override.parse(text) for text in texts]


def _key(section: Mapping[Any, Any], name: str) -> Any:
    """The key that `name` means, which may be a number."""
    return int(name) if name not in section and name.isdecimal() and int(name) in section else name


def _value(text: str, override: str) -> Any:
    """A value by hydra's rules: only true, false and null are names, `[..]` and `{..}` are YAML, the rest is a text."""
    if text.lower() in _NAMES:
        return _NAMES[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    if text[:1] in ("'", '"'):
        return parse_yaml(text, f"the override {override!r}")
    if text[:1] in ("[", "{"):
        quoted = _UNQUOTED.sub(r"'\g<0>'", _UNSPACED.sub(r"\1: ", text))
        return parse_yaml(quoted, f"the override {override!r}")
    return text
