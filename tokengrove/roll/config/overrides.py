"""Changes of a configuration as hydra's command line writes them: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.composition import merge
from tokengrove.roll.config.yaml_text import parse_yaml

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
        if "@" in match[2]:
            raise InvalidRequest(f"the override {text!r} chooses a file that no defaults list has; put it in the list")
        value = None if match[3] is None else _value(match[3].strip(), text)
        return cls(text, match[1] or "", tuple(match[2].split(".")), value)

    def apply(self, values: dict[str, Any], known: Callable[[tuple[str, ...]], bool]) -> None:
        """Change `values`; a mapping is merged into one. `known`: whether files may have left a path out.

        Raises InvalidRequest for a path that does not exist and is not `known`, unless the sign adds it.
        """
        section = self._section(values, create=self.sign in ("+", "++") or known(self.path))
        name = _key(section, self.path[-1])
        there = _has(section, name)
        if self.sign == "~":
            if not there:
                raise self._unknown(section, self.path[-1])
            del section[name]
        elif not there and (isinstance(section, list) or not (self.sign or known(self.path))):
            raise self._unknown(section, self.path[-1])
        elif self.sign == "+" and there:
            raise InvalidRequest(f"the override {self.text!r} adds what is there already; leave the + out, or write ++")
        elif there and isinstance(section[name], dict) and isinstance(self.value, dict):
            merge(section[name], self.value)
        else:
            section[name] = self.value

    def _section(self, values: dict[str, Any], *, create: bool) -> Any:
        """The mapping or list that has, or will have, the last name of the path."""
        section: Any = values
        for at, name in enumerate(self.path[:-1]):
            key = _key(section, name)
            if create and isinstance(section, dict) and section.get(key) is None:
                section[key] = {}
            if not _has(section, key):
                raise self._unknown(section, name)
            below = section[key]
            if not isinstance(below, dict | list):
                raise self._no_section(below, ".".join(self.path[: at + 1]), ".".join(self.path[at + 1 :]))
            section = below
        return section

    def _no_section(self, value: Any, path: str, rest: str) -> InvalidRequest:
        referred = re.fullmatch(r"\$\{([\w.]+)\}", value.strip()) if isinstance(value, str) else None
        way = f"; change it there: {self.sign}{referred[1]}.{rest}=..." if referred else ""
        return InvalidRequest(
            f"the override {self.text!r} needs a section at {path}, which is {value!r}{way}", param=path
        )

    def _unknown(self, section: dict[str, Any] | list[Any], name: str) -> InvalidRequest:
        near = get_close_matches(name, [str(each) for each in section], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        way = "" if self.sign == "~" else f"; to add it, write +{self.text.lstrip('+')}"
        path = ".".join(self.path)
        return InvalidRequest(f"the override {self.text!r}: the configuration has no {name!r}{hint}{way}", param=path)


def parse_overrides(texts: Sequence[str], groups: Collection[str]) -> tuple[dict[str, str], list[Override]]:
    """The options chosen for `groups`, as `group=option` does, and the changes of settings.

    Raises InvalidRequest for a text that is neither, and for one text instead of a list of them.
    """
    if isinstance(texts, str):
        raise InvalidRequest(f"overrides is a list of texts, such as [{texts!r}]")
    named = {text: text.partition("=")[0].strip() for text in texts}
    chosen = {name: text.partition("=")[2].strip() for text, name in named.items() if "=" in text and name in groups}
    return chosen, [Override.parse(text) for text in texts if named[text] not in chosen]


def _key(section: dict[Any, Any] | list[Any], name: str) -> Any:
    """The key that `name` means, which may be a number, and is one in a list."""
    number: Any = int(name) if name.isdecimal() else name
    return number if isinstance(section, list) or (name not in section and number in section) else name


def _has(section: dict[Any, Any] | list[Any], key: Any) -> bool:
    return isinstance(key, int) and key < len(section) if isinstance(section, list) else key in section


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
