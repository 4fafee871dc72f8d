"""Which reward of an interaction counts in an export. What is stored is not touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Granularity(StrEnum):
    """ROLL's words for what counts: the share of passed checks, or only whether all passed."""

    PASS_RATE = "pass_rate"
    BINARY = "binary"


PASS_RATE = "pass_rate"
"""The named reward that both granularities look at."""


@dataclass(frozen=True, slots=True)
class MainReward:
    """The reward named `name` where it is set, else the raw one; `binary`: 1.0 if that is at least 1, else 0.0."""

    name: str | None = None
    binary: bool = False

    @classmethod
    def at(cls, granularity: Granularity) -> MainReward:
        """`pass_rate`: the reward of that name, falling back to the raw one. `binary`: 1.0 where that is >= 1."""
        return cls(PASS_RATE, granularity is Granularity.BINARY)

    def of(self, reward: float | None, rewards: Mapping[str, float]) -> float | None:
        """The reward that counts; None where none is set."""
        value = rewards.get(self.name, reward) if self.name is not None else reward
        if value is None or not self.binary:
            return value
        return 1.0 if value >= 1.0 else 0.0


RAW = MainReward()
