"""`reward_granularity`: the metric of a runner that is the score of its episodes, where a configuration names one.

Only a metric that is named replaces a score. One that no episode of the first finished group has is misspelt, or the
runner does not measure it: the run ends then, as all its scores would be others than were asked for.
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
"""The key of a rollout's `meta_info` that has the episode's `ScoreMetric`."""


def metric_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric as a score; None if it is no finite number."""
    value = metrics.get(name)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class ScoreMetric:
    """The metric `name` that scores the environments of `tag`, as one episode had it.

    `seen`: its metrics that are finite numbers. `finished`: it was played to its end.
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
    """Remembers of each tag that its metric exists, once a group has told."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str]] = set()

    def check(self, group: Iterable[ScoreMetric]) -> None:
        """Raise InvalidRequest, which names the metrics that were seen, if the first finished group of a tag had not
        the metric that scores it. A group without an episode that was played to its end tells nothing.
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
            f"reward_granularity of {first.tag!r} is {first.name!r}, and no episode of the first finished group has a "
            f"metric of that name. Metrics that were seen: {', '.join(seen) or 'none'}. Name one of these, or leave "
            "reward_granularity out: then the score of the runner counts",
            param="reward_granularity",
        )
