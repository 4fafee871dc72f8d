"""Quantiles of a histogram, as Prometheus' `histogram_quantile` computes them: linear within a bucket."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """The value below which the fraction `share` of the values lie; None without values.

    `counts`: the number of values in each bucket, the last of which has no bound. Its values count as the last bound.
    """
    rank, below = share * sum(counts), 0.0
    if not rank:
        return None
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound
    return bounds[-1]
