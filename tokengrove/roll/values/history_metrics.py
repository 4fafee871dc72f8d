"""The metrics of an environment's steps, aggregated for the episode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_MODES: dict[str, Callable[[Sequence[float]], Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
}


def aggregate_metrics(
    history_metrics: Iterable[Mapping[str, Any]], metrics_agg_mode: Mapping[str, str]
) -> dict[str, float]:
    """One number for each metric, from the steps that have it.

    `metrics_agg_mode`: by metric sum, mean, min, max, last or first; others use the mean. Values that are not numbers
    are left out.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in history_metrics:
        for name, value in metrics.items():
            if (number := _number(value)) is not None:
                values[name].append(number)
    return {name: float(_MODES.get(metrics_agg_mode.get(name, ""), np.mean)(found)) for name, found in values.items()}


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
