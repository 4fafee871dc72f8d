"""How an option is declared: as a field of a dataclass, made by `option`. `options_of` reads the declarations.

The field's name is the option's key in a body or a file, its type says which values it takes, and its default is the
value if it is absent. An option of type `X | None` has no value by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, Literal, NewType, TypedDict, Unpack, get_args, get_origin, get_type_hints

from tokengrove.errors import ConfigurationError

Conditions = NewType("Conditions", Mapping[str, Any])
"""Conditions by key: each a value, a list of values, or `{"min": ..., "max": ...}`."""

NumberCondition = NewType("NumberCondition", object)
"""A condition on a number: the number, a list of numbers, or `{"min": ..., "max": ...}`."""


class About(TypedDict, total=False):
    """What is said of an option, beside its help.

    - `least`, `most`: bounds of a number, both included. `above`: a bound that is not included.
    - `choices`: the words that it takes, if its type does not say them.
    - `unit`: of a number.
    - `otherwise`: in words, what holds if it is absent; empty for nothing.
    - `panel`: the heading of its flag in `--help`. `flag`: the name of its flag, if it is not that of the option.
    - `note`: Markdown that the documents say after the help.
    - `secret`: the value is a key.
    - `tokens`: it decides what becomes of a token.
    """

    choices: tuple[str, ...]
    least: float
    most: float
    above: float
    panel: str
    flag: str
    otherwise: str
    unit: str
    note: str
    secret: bool
    tokens: bool


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `kind` is its type without None."""

    name: str
    kind: Any
    default: Any
    help: str
    about: About

    @property
    def parameter(self) -> str:
        """The name of its flag as a parameter: `train_turns`."""
        return self.about.get("flag", self.name)

    @property
    def flag(self) -> str:
        """Its flag: `--train-turns`."""
        return flag_of(self.parameter)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes, or that its list takes; none if it takes other values."""
        if "choices" in self.about:
            return self.about["choices"]
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        words = [kind for kind in (self.kind, *get_args(self.kind)) if isinstance(kind, type)]
        return tuple(word.value for kind in words if issubclass(kind, StrEnum) for word in kind)

    @property
    def repeats(self) -> bool:
        """Whether it has several values, so that its flag may be repeated."""
        return get_origin(self.kind) in (tuple, frozenset, Mapping) or self.kind is Conditions

    @property
    def default_text(self) -> str | None:
        """What holds if it is absent, in words; None if that is nothing."""
        if "otherwise" in self.about:
            return self.about["otherwise"] or None
        if self.default is None or self.default is False or self.default in ((), {}, frozenset()):
            return None
        if isinstance(self.default, bool):
            return "true"
        return _number(self.default) if isinstance(self.default, float) else str(self.default)

    def check(self, value: Any) -> None:
        """Raise ConfigurationError that names the flag for a value out of its bounds, or none of its words."""
        for each in value if isinstance(value, tuple | frozenset) else () if value is None else (value,):
            if (fault := self.fault(each)) is not None:
                raise ConfigurationError(f"{self.flag} {fault}")

    def fault(self, value: Any) -> str | None:
        """What is wrong with one value: "must be at least 1, not 0". None: nothing."""
        about, choices = self.about, self.choices
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, not {value}"
        if choices and value not in choices:
            return f"must be one of {', '.join(choices)}, not {value!r}"
        if not about.keys() & {"least", "most", "above"}:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be a number, not {value!r}"
        below = value < about.get("least", -math.inf) or value <= about.get("above", -math.inf)
        outside = below or value > about.get("most", math.inf)
        return f"must be {_bounds(about)}, not {_number(value)}" if outside else None


def option(default: Any, help: str, **about: Unpack[About]) -> Any:
    """A field that is an option."""
    metadata = {"help": help, "about": about}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of a name."""
    return f"--{name.replace('_', '-')}"


def options_of(*groups: type) -> Mapping[str, Option]:
    """The options of dataclasses by name, in the order of their declarations. A field without a help text is none."""
    return _options_of(groups)


@cache
def _options_of(groups: tuple[type, ...]) -> Mapping[str, Option]:
    found = {}
    for group in groups:
        kinds = get_type_hints(group)
        for each in fields(group):
            if "help" in each.metadata:
                default = {} if each.default is MISSING else each.default
                kind = _without_none(kinds[each.name])
                found[each.name] = Option(each.name, kind, default, each.metadata["help"], each.metadata["about"])
    return found


def _bounds(about: About) -> str:
    """The bounds of a number in words."""
    if "least" in about and "most" in about:
        return f"between {_number(about['least'])} and {_number(about['most'])}"
    given = (
        ("more than", about.get("above")),
        ("at least", about.get("least")),
        ("at most", about.get("most")),
    )
    return " and ".join(f"{word} {_number(bound)}" for word, bound in given if bound is not None)


def _number(value: float) -> str:
    """A number without the decimals of a whole one."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)


def _without_none(kind: Any) -> Any:
    """The type without None."""
    parts = get_args(kind)
    if NoneType not in parts:
        return kind
    rest = [part for part in parts if part is not NoneType]
    whole = rest[0]
    for part in rest[1:]:
        whole = whole | part
    return whole
