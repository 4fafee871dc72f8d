"""The rules of `--keep`: how long the server keeps ended sessions of some groups and steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from proxy.settings.durations import seconds_of
from tokengrove.errors import ConfigurationError

DAY_S = 86_400.0
_STEP = re.compile(r"step<(\d+)")


@dataclass(frozen=True, slots=True)
class Rule:
    """Which sessions it is about, and their age in seconds at which they go; None: never.

    `group`: a pattern of group ids, with * and ?. `step_below`: sessions whose metadata has a smaller `step`.
    `unexported`: also sessions that were never exported or acknowledged.
    """

    age_s: float | None
    group: str | None = None
    step_below: int | None = None
    unexported: bool = False

    def fits(self, group_id: str | None, step: Any) -> bool:
        """Whether it is about a session of this group and with this `step` in its metadata."""
        if self.group is not None and (group_id is None or not fnmatchcase(group_id, self.group)):
            return False
        if self.step_below is None:
            return True
        return isinstance(step, int | float) and not isinstance(step, bool) and step < self.step_below


def read_rules(keep_days: float | None, texts: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules in order; the first that fits a session decides. `keep_days` is the last one, for all sessions.

    Raises ConfigurationError.
    """
    last = () if keep_days is None else (Rule(keep_days * DAY_S),)
    return (*map(_rule, texts), *last)


def _rule(text: str) -> Rule:
    unexported = text.endswith(":unexported")
    named, colon, age = text.removesuffix(":unexported").rpartition(":")
    found: dict[str, Any] = {}
    for each in named.split(","):
        if (step := _STEP.fullmatch(each)) is not None and "step_below" not in found:
            found["step_below"] = int(step[1])
        elif each.startswith("group=") and each != "group=" and "group" not in found:
            found["group"] = each.removeprefix("group=")
        else:
            raise _wrong(text)
    seconds, forever = seconds_of(age), age == "forever"
    if not colon or (seconds is None and not forever) or (forever and unexported):
        raise _wrong(text)
    return Rule(seconds, **found, unexported=unexported)


def _wrong(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"--keep {text!r} is not a rule such as group=eval-*:90d, step<1000:12h, group=base,step<10:forever or "
        "group=smoke-*:1h:unexported"
    )
