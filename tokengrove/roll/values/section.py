"""A section of a configuration: a mutable dict whose keys are also attributes, at every depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Section(dict[str, Any]):
    """`section["a"]["b"]` and `section.a.b`. Mappings within it, also in lists, are sections. `name in section` works.

    A missing attribute raises AttributeError; `section["x"]` raises KeyError.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None, /, **more: Any) -> None:
        super().__init__()
        self.update(values or (), **more)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            there = ", ".join(map(str, self))
            raise AttributeError(f"the configuration has no {name!r} here; it has {there}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _wrapped(value))

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(name) from None

    def update(self, *values: Any, **more: Any) -> None:
        """Like dict's; mappings in the values become sections."""
        for name, value in dict(*values, **more).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Like dict's; mappings in the value become sections."""
        if name not in self:
            self[name] = default
        return self[name]

    def copy(self) -> Section:
        """A section with the same values."""
        return Section(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists at every depth."""
        return {name: _plain(value) for name, value in self.items()}


def as_section(values: Any) -> Any:
    """A plain dict as a Section; other objects, such as a Section or an OmegaConf DictConfig, unchanged."""
    return Section(values) if type(values) is dict else values


def _wrapped(value: Any) -> Any:
    if isinstance(value, Section):
        return value
    if isinstance(value, Mapping):
        return Section(value)
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(each) for each in value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    return value
