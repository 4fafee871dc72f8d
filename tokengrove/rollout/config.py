"""Configurations of trainers, read by attribute and by key, whatever their type.

A setting that the configuration lacks is read from the defaults. If the defaults also lack it, the error names its full
dotted path. A section is read on access, so the configuration may be changed until then.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson

from tokengrove.errors import InvalidRequest

_UNSET = "???"  # OmegaConf's marker of a required setting
_NAMES = {"null": None, "none": None, "true": True, "false": False}
_ABSENT = object()
_MOST_TRAIL = 50


class MissingSetting(InvalidRequest, AttributeError, KeyError):
    """Neither the configuration nor its defaults have the setting, or its value is `???`."""

    def __str__(self) -> str:
        return self.message


class Config(Mapping[str, Any]):
    """A section of a configuration: `config.a.b`, `config["a"]["b"]`, `config.get("a")` and `config.select("a.b")`.

    `source`: a mapping (also an OmegaConf `DictConfig`), a dataclass, a namespace, another object with attributes, or a
    Config. `defaults`: a mapping with the settings that `source` may lack; a section of it may be None or missing in
    `source`. Strings may contain these interpolations of OmegaConf, which are resolved from the root: `${a.b}`, `${.b}`
    (relative to the section), `${oc.select:a.b,default}`, `${oc.env:NAME,default}`, `${oc.decode:text}` and
    `${now:%Y}`.

    Raises MissingSetting (an AttributeError and a KeyError) for a setting that does not exist or is `???`, and
    InvalidRequest for an unknown, circular or unclosed interpolation and for a missing environment variable.
    """

    __slots__ = ("_defaults", "_made", "_path", "_root", "_source")

    def __init__(self, source: object, defaults: Mapping[str, Any] | None = None) -> None:
        fields = _fields(source, root=True)
        if fields is None:
            raise InvalidRequest(f"a configuration is a mapping or has attributes; this is {type(source).__name__!r}")
        self._source: Mapping[str, Any] = fields
        self._defaults: Mapping[str, Any] = defaults or {}
        self._root: Config = self
        self._path: tuple[str, ...] = ()
        self._made = datetime.now()

    @classmethod
    def _section(cls, root: Config, path: tuple[str, ...], source: Mapping[str, Any], defaults: object) -> Config:
        section = cls.__new__(cls)
        section._source = source
        section._defaults = defaults if isinstance(defaults, Mapping) else {}
        section._root, section._path, section._made = root, path, root._made
        return section

    def __getitem__(self, name: str) -> Any:
        return self._value(name, ())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Config.__slots__:  # copy and pickle look these up
            raise AttributeError(name)
        return self._value(name, ())

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._source), **dict.fromkeys(self._defaults)})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._source or name in self._defaults

    def __repr__(self) -> str:
        return f"Config({dict(self._source)!r})"

    def source(self) -> Mapping[str, Any]:
        """The source of this section, with unresolved interpolations."""
        return self._source

    def given(self) -> list[str]:
        """The names of this section's settings that are set explicitly, not by default."""
        return list(map(str, self._source))

    def has_defaults(self, defaults: Mapping[str, Any]) -> bool:
        """Whether `defaults` is the object with the defaults of this section."""
        return self._defaults is defaults

    def select(self, path: str, default: Any = None) -> Any:
        """The setting at a dotted path below this section, or `default` if it does not exist."""
        return self._found(path.split("."), (), default)

    def to_dict(self) -> dict[str, Any]:
        """This section with its defaults as plain dicts and lists, with resolved interpolations."""
        try:
            return {name: _plain(value) for name, value in self.items()}
        except RecursionError:
            raise InvalidRequest("the configuration is nested too deeply") from None

    def _value(self, name: str, trail: tuple[str, ...]) -> Any:
        default = self._defaults.get(name, _ABSENT)
        value = self._source.get(name, _ABSENT)
        if value is _ABSENT or (value is None and isinstance(default, Mapping)):
            value = default
            default = _ABSENT
        path = (*self._path, str(name))
        if value is _ABSENT or (isinstance(value, str) and value == _UNSET):
            dotted = ".".join(path)
            why = "must be set: it is ???" if value is not _ABSENT else "is not in the configuration"
            raise MissingSetting(f"{dotted} {why}", param=dotted)
        return self._wrapped(value, default, path, trail)

    def _wrapped(self, value: Any, default: object, path: tuple[str, ...], trail: tuple[str, ...]) -> Any:
        if isinstance(value, str):
            return _Interpolation(self, trail).resolved(value)
        if (fields := _fields(value, root=False)) is not None:
            return Config._section(self._root, path, fields, default)
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            items = (self._wrapped(each, _ABSENT, (*path, str(at)), trail) for at, each in enumerate(value))
            return tuple(items) if isinstance(value, tuple) else list(items)
        return value

    def _found(self, names: Sequence[str], trail: tuple[str, ...], default: Any) -> Any:
        found: Any = self
        for name in names:
            if isinstance(found, list | tuple) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Config) and (key := found._key(name)) in found:
                found = found._value(key, trail)
            else:
                return default
        return found

    def _key(self, name: str) -> Any:
        """The key that `name`, a part of a dotted path, refers to. Keys may be integers."""
        number: Any = int(name) if name.isdecimal() else name
        return number if name not in self and number in self else name


class _Interpolation:
    """Resolves the strings of one section. `trail`: the expressions that led here, to detect cycles."""

    def __init__(self, section: Config, trail: tuple[str, ...]) -> None:
        self._section, self._trail = section, trail

    def resolved(self, text: str) -> Any:
        """The value of the expression if the text is one expression; otherwise the text with all values inserted."""
        if "${" not in text:
            return text
        parts = list(_parts(text))
        if len(parts) == 1:
            return self._value(parts[0][1]) if parts[0][0] else parts[0][1]
        return "".join(str(self._value(part)) if is_expression else part for is_expression, part in parts)

    def _value(self, expression: str) -> Any:
        if expression in self._trail:
            raise InvalidRequest(f"the interpolation ${{{expression}}} in the configuration leads to itself")
        if len(self._trail) >= _MOST_TRAIL:
            raise InvalidRequest(f"more than {_MOST_TRAIL} interpolations of the configuration lead to each other")
        kind, colon, rest = expression.partition(":")
        if not colon:
            return self._of_path(expression, expression)
        if kind == "now":
            return self._section._made.strftime(rest)
        if kind == "oc.decode":
            text = self.resolved(rest)
            return self._default(text.strip().strip("'\"")) if isinstance(text, str) else text
        name, comma, default = (each.strip() for each in rest.partition(","))
        if kind == "oc.select":
            found = self._of_path(name, expression, _ABSENT)
            return self._default(default if comma else "null") if found is _ABSENT else found
        if kind == "oc.env":
            found = os.environ.get(name, _ABSENT)
            if found is _ABSENT and not comma:
                raise InvalidRequest(f"the configuration needs the environment variable {name}")
            return self._default(default) if found is _ABSENT else found
        known = "${a.b}, ${oc.select:a.b,default}, ${oc.env:NAME,default}, ${oc.decode:text} and ${now:%Y}"
        raise InvalidRequest(f"the configuration has ${{{expression}}}; supported interpolations: {known}")

    def _of_path(self, path: str, expression: str, *default: Any) -> Any:
        names = path.strip().lstrip(".")
        up = len(path.strip()) - len(names)
        at = [*self._section._path[: len(self._section._path) - up + 1], *names.split(".")] if up else names.split(".")
        found = self._section._root._found(at, (*self._trail, expression), *(default or (_ABSENT,)))
        if found is _ABSENT and not default:
            raise MissingSetting(f"{'.'.join(at)} is not in the configuration, and ${{{expression}}} needs it")
        return found

    def _default(self, text: str) -> Any:
        """A default, parsed like YAML: a name, a number, an empty list or mapping, a text, or an interpolation."""
        if "${" in text:
            return self.resolved(text)
        if text.lower() in _NAMES:
            return _NAMES[text.lower()]
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            return text.strip("'\"")


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Split a text into expressions, without `${` and `}`, and the text around them."""
    at = 0
    while (start := text.find("${", at)) >= 0:
        if start > at:
            yield False, text[at:start]
        at = _end(text, start)
        yield True, text[start + 2 : at - 1]
    if at < len(text):
        yield False, text[at:]


def _end(text: str, start: int) -> int:
    """The position after the brace that closes the expression at `start`."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return start + brace.end()
    raise InvalidRequest(f"the configuration has {text!r}, which lacks a closing brace")


def _fields(value: object, *, root: bool) -> Mapping[str, Any] | None:
    """The fields of a section; None if the value is not a section. Only the root may be an arbitrary object."""
    if isinstance(value, Config):
        return value
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value).__name__ in ("Namespace", "SimpleNamespace") or (root and hasattr(value, "__dict__")):
        return vars(value)
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
