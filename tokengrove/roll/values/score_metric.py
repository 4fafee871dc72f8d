"""`reward_granularity`: the metric of a runner that is the score of its episodes, if the configuration names one.

Only a named metric replaces a score. If no episode of the first finished group has it, its name is misspelt or the
runner does not measure it. Then the run ends, since its scores would not be the requested ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tokengrove.errors import InvalidRequest

BINARY = "binary"
"""ROLL's other value: the score of the runner itself, unless a metric has this name."""
SCORE_METRIC = "score_metric"
"""The key of a rollout's `meta_info` for the episode's `ScoreMetric`."""


def metric_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric as a score; None if it is not a finite number."""
    value = metrics.get(name)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class ScoreMetric:
    """The metric `name` that scores the environments of `tag`, in one episode.

    `seen`: its metrics that are finite numbers. `finished`: whether its status is Finished.
    """

    tag: str
    name: str
    seen: tuple[str, ...]
    finished: bool

    @classmethod
    def of(cls, tag: str, name: str, metrics: Mapping[str, Any], status: str) -> ScoreMetric:
        seen = tuple(str(each) for each in metrics if metric_value(metrics, each) is not None)
        return cls(tag, name, seen, status == "Finished")


class ScoreMetrics:
    """Remembers the tags whose metric has been found in a group."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str]] = set()

    def check(self, group: Iterable[ScoreMetric]) -> None:
        """Raise InvalidRequest, with the metrics that were seen, if the first finished group of a tag lacks the metric
        that scores it. Groups without a Finished episode are ignored.
        """
        told = [each for each in group if (each.tag, each.name) not in self._found and each.name != BINARY]
        if not any(each.finished for each in told):
            return
        first = told[0]
        if any(first.name in each.seen for each in told):
            self._found.add((first.tag, first.name))
            return
        seen = sorted({name for each in told for name in each.seen})
        raise InvalidRequest(
            f"reward_granularity of {first.tag!r} is {first.name!r}, but no episode of the first finished group has a "
            f"metric of that name. Metrics that were seen: {', '.join(seen) or 'none'}. Name one of these, or remove "
            "reward_granularity to use the score of the runner",
            param="reward_granularity",
        )
