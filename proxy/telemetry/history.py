"""The last hour in samples of five seconds: the counts of each interval, and measurements at its end.

Every process takes samples at the same times, so the samples of several processes can be added. A sample reads a few
dozen numbers, whatever the load of the server. Nothing else runs while nobody watches.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add

from proxy.telemetry.families import Counts, Histogram, Numbered
from proxy.telemetry.groups import EngineMetrics, HttpMetrics, TurnMetrics

EVERY_S = 5
SAMPLES = 3600 // EVERY_S

COUNTED = (
    *("turns", "failed", "aborted", "prompt_tokens", "output_tokens", "cached_tokens"),
    *("retries", "forks", "errors"),
)
"""The counts of a sample, in order."""
MEASURED = ("in_flight", "waiting")
"""The measurements at the end of a sample, in order."""
FIRST_TOKEN = len(COUNTED)
"""The index of the counts of turns by time to first token: one count for each bucket of the histogram."""

_STATUSES = ("complete", "failed", "aborted")
"""The values of `reasons.Status` that are counted, in the order of COUNTED."""
_NO_FORK = frozenset({"first", "continued", "new_root"})
"""The values of `reasons.Reason` that are not forks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample. `slot`: its end, in units of EVERY_S since 1970.

    `counted`: the counts of COUNTED, then the buckets from index FIRST_TOKEN on. `measured`: the values of MEASURED.
    """

    slot: int
    counted: Sequence[float]
    measured: Sequence[float]

    @property
    def at(self) -> float:
        """The end of the sample in Unix seconds."""
        return float(self.slot * EVERY_S)

    def plus(self, other: Sample) -> Sample:
        """The sum of this sample and a sample of another process at the same time."""
        return Sample(
            self.slot, list(map(add, self.counted, other.counted)), list(map(add, self.measured, other.measured))
        )


class History:
    """The samples of one process. Use it only on the event loop."""

    def __init__(self, turns: TurnMetrics, engine: EngineMetrics, http: HttpMetrics) -> None:
        self._turns, self._engine, self._http = turns, engine, http
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._before = self._counts()

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S - time.time() % EVERY_S)
            self.take(time.time())

    def take(self, now: float) -> None:
        """Take the sample that ends at `now` (Unix seconds). If the clock was set back, extend the last sample."""
        counts = self._counts()
        counted = [after - before for after, before in zip(counts, self._before, strict=True)]
        self._before = counts
        sample = Sample(round(now / EVERY_S), counted, (_only(self._turns.in_flight), _only(self._engine.waiting)))
        if self._samples and self._samples[-1].slot >= sample.slot:
            last = self._samples.pop()
            sample = Sample(last.slot, list(map(add, last.counted, counted)), sample.measured)
        self._samples.append(sample)

    def since(self, slot: int) -> list[Sample]:
        """The samples that end at `slot` or later, oldest first."""
        found = []
        for sample in reversed(self._samples):
            if sample.slot < slot:
                break
            found.append(sample)
        return found[::-1]

    def _counts(self) -> list[float]:
        turns = self._turns
        return [
            *(_sum(turns.ended, status, 1) for status in _STATUSES),
            *(turns.tokens.by[("prompt",)], turns.tokens.by[("output",)], turns.cached.by[()]),
            *(sum(turns.retries.by.values()), _forks(turns.interactions), sum(self._http.errors.by.values())),
            *_buckets(turns.first_token),
        ]


def added(histories: Iterable[Sequence[Sample]]) -> list[Sample]:
    """The sums of the samples of several processes, oldest first."""
    by_slot: dict[int, Sample] = {}
    for samples in histories:
        for sample in samples:
            other = by_slot.get(sample.slot)
            by_slot[sample.slot] = sample if other is None else other.plus(sample)
    return [by_slot[slot] for slot in sorted(by_slot)]


def _sum(counts: Counts, value: str, label: int) -> float:
    return sum(number for labels, number in counts.by.items() if labels[label] == value)


def _forks(interactions: Counts) -> float:
    return sum(number for labels, number in interactions.by.items() if labels[0] not in _NO_FORK)


def _only(family: Numbered) -> float:
    return family.now().get((), 0.0)


def _buckets(histogram: Histogram) -> Sequence[int]:
    ((counts, _),) = histogram.now().values()
    return counts
