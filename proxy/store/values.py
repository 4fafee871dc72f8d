"""A condition on one value of a session's metadata or metrics."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.types import Json


@dataclass(frozen=True, slots=True)
class Wanted:
    """The value must equal one of `choices`, if any (null: a missing value), or else be a number in a range.

    JSON's true and 1 are different values, 1 and 1.0 are not. `least` and `most` are inclusive.
    """

    choices: tuple[Json, ...] = ()
    least: float | None = None
    most: float | None = None

    def fits(self, value: Json) -> bool:
        """Whether a value meets the condition."""
        if self.choices:
            return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
