"""The main reward of an interaction: the one that an export uses. Stored rewards do not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Granularity(StrEnum):
    """ROLL's reward granularities: the share of passed checks, or 1 only if all passed."""

    PASS_RATE = "pass_rate"
    BINARY = "binary"


PASS_RATE = "pass_rate"
"""The named reward that both granularities read."""


@dataclass(frozen=True, slots=True)
class MainReward:
    """The reward named `name` if it is set, else the raw reward. With `binary`: 1.0 if that is >= 1, else 0.0."""

    name: str | None = None
    binary: bool = False

    @classmethod
    def at(cls, granularity: Granularity) -> MainReward:
        """The main reward of a granularity. Both read the reward named `pass_rate`, else the raw one."""
        return cls(PASS_RATE, granularity is Granularity.BINARY)

    def of(self, reward: float | None, rewards: Mapping[str, float]) -> float | None:
        """The main reward of an interaction with these rewards; None if it has none."""
        value = rewards.get(self.name, reward) if self.name is not None else reward
        if value is None or not self.binary:
            return value
        return 1.0 if value >= 1.0 else 0.0


RAW = MainReward()
