"""The main rewards of a session's turns, which an export uses. Stored rewards do not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from proxy.types import Json
from tokengrove.options.export import Granularity
from tokengrove.options.session import Purpose


class Scored(Protocol):
    """The reward fields of a turn: its raw reward, and its other rewards by name."""

    @property
    def id(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class MainReward:
    """The raw rewards, or the rewards called `name`.

    A name is looked up in the rewards of the turns, then in the session's metrics; `metrics_first` reverses the order.
    A metric is a reward of the whole session: it replaces the rewards of all turns. A turn without a reward of this
    name has its raw reward.
    """

    name: str | None = None
    metrics_first: bool = False

    @classmethod
    def at(cls, granularity: Granularity) -> MainReward:
        """The metric of this name, else the episode's score, as in ROLL's `ProxyEnvManager._select_episode_score`."""
        return cls(granularity.value, metrics_first=True)

    def replaces(self, turns: Iterable[Scored], metrics: Mapping[str, Json]) -> bool:
        """Whether the session has a reward of this name, which replaces its raw rewards and its score."""
        if self.name is None:
            return False
        return isinstance(metrics.get(self.name), int | float) or any(self.name in turn.rewards for turn in turns)

    def of(
        self, turns: Iterable[Scored], metrics: Mapping[str, Json], purposes: Mapping[str, str]
    ) -> dict[str, float | None]:
        """The main reward of each turn by id, None if it has none. `turns` are complete, in order of completion.

        `purposes`, by id, are read only for a metric.
        """
        scored = list(turns)
        if self.name is None:
            return {turn.id: turn.reward for turn in scored}
        metric = metrics.get(self.name)
        named = any(self.name in turn.rewards for turn in scored)
        if isinstance(metric, int | float) and (self.metrics_first or not named):
            return _whole(scored, float(metric), purposes)
        return {turn.id: turn.rewards.get(self.name, turn.reward) for turn in scored}


def _whole(turns: list[Scored], value: float, purposes: Mapping[str, str]) -> dict[str, float | None]:
    """Assign a session's reward to one turn: the last rewarded turn, else the main agent's last turn, else the last."""
    rewarded = [turn for turn in turns if turn.reward is not None]
    main = [turn for turn in turns if purposes[turn.id] == Purpose.MAIN]
    last = (rewarded or main or turns)[-1] if turns else None
    return {turn.id: value if turn is last else None for turn in turns}


RAW = MainReward()
