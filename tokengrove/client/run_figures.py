"""Figures of training runs by step, from the pages of `GET /rl/runs`, whose sums add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import Any

Json = Any
_ADDED = (
    *("sessions", "ended", "turns", "forks", "failed", "output_tokens"),
    *("rewarded", "score_sum", "score_squares", "compared", "kl_sum"),
)
_MOST_WORST = 10


class RunFigures:
    """Adds up pages."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Json, Json], dict[str, Json]] = {}

    def add(self, entries: Iterable[Mapping[str, Json]]) -> None:
        """Add the `runs` of a page."""
        for entry in entries:
            known = self._sums.setdefault((entry["run"], entry["step"]), {"largest_ratio": None, "worst": []})
            for name in _ADDED:
                known[name] = known.get(name, 0) + entry[name]
            ratios = [each for each in (known["largest_ratio"], entry["largest_ratio"]) if each is not None]
            known["largest_ratio"] = max(ratios, default=None)
            every = [*known["worst"], *entry["worst"]]
            known["worst"] = nsmallest(_MOST_WORST, every, key=lambda each: (each["score"], each["session_id"]))

    def figures(self) -> list[dict[str, Json]]:
        """The figures of each run and step, by run and step; those without a number as step come last."""
        return [
            {"run": run, "step": step, **_figures(sums)}
            for (run, step), sums in sorted(self._sums.items(), key=lambda item: _order(*item[0]))
        ]


def _order(run: Json, step: Json) -> tuple[Json, ...]:
    known = isinstance(step, int | float)
    return run is None, str(run), not known, step if known else 0, str(step)


def _figures(sums: Mapping[str, Json]) -> dict[str, Json]:
    sessions, rewarded = sums["sessions"], sums["rewarded"]
    mean = sums["score_sum"] / rewarded if rewarded else None
    std = None
    if rewarded > 1:
        assert mean is not None
        std = math.sqrt(max(sums["score_squares"] - rewarded * mean * mean, 0.0) / (rewarded - 1))
    return {
        **{name: sums[name] for name in ("sessions", "ended", "rewarded")},
        "mean_score": mean,
        "std_score": std,
        "mean_turns": sums["turns"] / sessions,
        "mean_output_tokens": sums["output_tokens"] / sessions,
        **{name: sums[name] for name in ("forks", "failed")},
        "kl": sums["kl_sum"] / sums["compared"] if sums["compared"] else None,
        "largest_ratio": sums["largest_ratio"],
        "worst": sums["worst"],
    }
