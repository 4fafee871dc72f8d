"""The numbers of a server as JSON: its metrics, and the samples of its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.telemetry.families import SECONDS
from proxy.telemetry.history import COUNTED, EVERY_S, FIRST_TOKEN, MEASURED, Sample
from proxy.telemetry.metrics import Snapshot
from tokengrove.reasons import Reason, Status

LATELY_S = 30
"""The period of the rates, in seconds."""
_QUANTILES_S = 300
"""The period of the quantiles, in seconds."""
_MINUTE = 60 // EVERY_S
_RATES = tuple(name for name in COUNTED if name != "aborted")


def counts_json(numbers: Snapshot) -> dict[str, Any]:
    """The counts since the start of the server."""
    ended, reasons = _by(numbers, "tokengrove_turns", 1), _by(numbers, "tokengrove_interactions", 0)
    tokens, errors = _by(numbers, "tokengrove_tokens", 0), _by(numbers, "tokengrove_errors", 0)
    routes = _by(numbers, "tokengrove_route_turns", 0)
    return {
        "turns": {status.value: ended.get(status, 0) for status in (Status.COMPLETE, Status.FAILED, Status.ABORTED)},
        "tokens": {
            "prompt": tokens.get("prompt", 0),
            "output": tokens.get("output", 0),
            "cached": _one(numbers, "tokengrove_cached_tokens"),
        },
        **({"turns_by_route": routes} if routes else {}),
        "reasons": {reason.value: reasons.get(reason, 0) for reason in Reason},
        "errors": {code: number for code, number in sorted(errors.items()) if number},
        "retries": _by(numbers, "tokengrove_retries", 0),
        "resubmissions": _by(numbers, "tokengrove_resubmissions", 0),
        "session_counts": {
            "started": _one(numbers, "tokengrove_sessions_started"),
            "ended": _by(numbers, "tokengrove_sessions_ended", 0),
            "expired": _one(numbers, "tokengrove_sessions_expired"),
            "deleted": _one(numbers, "tokengrove_sessions_deleted"),
        },
        "in_flight": _one(numbers, "tokengrove_in_flight"),
        "waiting": _one(numbers, "tokengrove_waiting"),
        "processes": _one(numbers, "tokengrove_processes"),
    }


def first_token_json(numbers: Snapshot, samples: Sequence[Sample], now: float) -> dict[str, Any]:
    """Seconds to the first token: since the start by bucket, and the quantiles of the last five minutes."""
    ((counts, total),) = numbers["tokengrove_first_token_seconds"].values()
    count, lately = sum(counts), _buckets([each for each in samples if each.at > now - _QUANTILES_S])
    return {
        "count": count,
        "mean": total / count if count else None,
        "p50": quantile(0.5, SECONDS, lately),
        "p95": quantile(0.95, SECONDS, lately),
        "bounds": SECONDS,
        "counts": counts,
    }


def rates_json(samples: Sequence[Sample], now: float) -> dict[str, Any]:
    """The counts per second in the last LATELY_S seconds."""
    lately = [each for each in samples if each.at > now - LATELY_S - EVERY_S]
    seconds = len(lately) * EVERY_S
    return {
        **{f"{name}_per_s": _total(lately, name) / seconds if seconds else 0.0 for name in _RATES},
        "over_s": seconds,
    }


def history_json(samples: Sequence[Sample], after: float) -> dict[str, Any]:
    """The samples that end after `after` (Unix seconds), oldest first, as a list for each number.

    Quantiles cover the minute before the end of a sample; null if it has no turn.
    """
    first = next((index for index, each in enumerate(samples) if each.at > after), len(samples))
    shown = samples[first:]
    p50, p95 = [], []
    for index in range(first, len(samples)):
        buckets = _buckets(samples[max(index - _MINUTE + 1, 0) : index + 1])
        p50.append(quantile(0.5, SECONDS, buckets))
        p95.append(quantile(0.95, SECONDS, buckets))
    return {
        "every_s": EVERY_S,
        "at": [each.at for each in shown],
        **{f"{name}_per_s": [each.counted[_place(name)] / EVERY_S for each in shown] for name in _RATES},
        **{name: [each.measured[place] for each in shown] for place, name in enumerate(MEASURED)},
        "first_token_p50_s": p50,
        "first_token_p95_s": p95,
    }


def _place(name: str) -> int:
    return COUNTED.index(name)


def _total(samples: Sequence[Sample], name: str) -> float:
    return sum(each.counted[_place(name)] for each in samples)


def _buckets(samples: Sequence[Sample]) -> list[float]:
    return [sum(column) for column in zip(*(each.counted[FIRST_TOKEN:] for each in samples), strict=True)]


def _one(numbers: Snapshot, name: str) -> float:
    number: float = numbers[name].get((), 0)
    return number


def _by(numbers: Snapshot, name: str, label: int) -> Mapping[str, float]:
    """The numbers of a metric family by the value of one label."""
    found: dict[str, float] = {}
    for labels, number in numbers[name].items():
        found[str(labels[label])] = found.get(str(labels[label]), 0) + number
    return found


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """The value below which the fraction `share` of the values lie; None without values.

    It is computed as Prometheus' `histogram_quantile` does: linear within a bucket.

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
