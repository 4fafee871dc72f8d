"""How far a trainer's logprobs are from those that were sampled, by what sampled them, and which sampler is to blame.

The trainer computes logprobs t of tokens that a sampler drew with logprobs s. The KL divergence of the trainer's
distribution from the sampler's is estimated as the mean of exp(t - s) - 1 - (t - s), which is never negative (J.
Schulman, "Approximating KL Divergence", 2020: k3). The ratio of a token is exp(|t - s|).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.told import Floats, Output
from proxy.types import Sampler

LOGPROBS, MASKED, CLIPPED = "logprobs", "is_masked", "is_clipped"
"""The names of streams that have a meaning here: the trainer's logprobs, and which tokens it masked and clipped."""
_LARGEST = 20.0
"""Differences of logprobs count as at most this: a ratio of 5e8."""

_WINDOW_TURNS = 256
_FEWEST_TURNS = 20
_ERRORS = 4.0
"""How many standard errors a mean must be away to count."""
_TIMES = 3.0
_FLOOR = 0.02
"""A sampler that is only worse than others is named from this share of the limit on."""
_MOST_SAMPLERS = 256


class Part(NamedTuple):
    """What a trainer told of consecutive tokens that one sampler drew with one weight version.

    `first`: the index of the first of them in the output. `tokens`: those that have a stream. `masked`, `clipped`: of
    these. `compared`: those with both logprobs; `kl`: the sum over them; `log_ratio`: the largest of them.
    """

    first: int
    version: int
    sampler: Sampler
    tokens: int
    masked: int
    clipped: int
    compared: int
    kl: float
    log_ratio: float


def parts_of(output: Output, streams: Mapping[str, Floats]) -> list[Part]:
    """The parts of an output that have a stream. `streams`: float32 [N] each, NaN where there is no value."""
    told = ~np.logical_and.reduce([np.isnan(each) for each in streams.values()])
    masked, clipped = (_is_true(streams.get(name), output.tokens) for name in (MASKED, CLIPPED))
    kl, log_ratio = _compared(output, streams.get(LOGPROBS))
    found = []
    for first, end, version, sampler in _runs(output):
        at = slice(first, end)
        if not (tokens := int(told[at].sum())):
            continue
        compared = int((~np.isnan(kl[at])).sum())
        found.append(
            Part(
                *(first, version, sampler, tokens, int(masked[at].sum()), int(clipped[at].sum()), compared),
                kl=float(np.nansum(kl[at])) if compared else 0.0,
                log_ratio=float(np.nanmax(log_ratio[at])) if compared else 0.0,
            )
        )
    return found


def _is_true(stream: Floats | None, tokens: int) -> NDArray[np.bool_]:
    return np.zeros(tokens, np.bool_) if stream is None else np.nan_to_num(stream) != 0


def _compared(output: Output, trainer: Floats | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The term of the KL and the log of the ratio of each token, NaN where they are unknown."""
    if trainer is None or output.logprobs is None:
        unknown = np.full(output.tokens, np.nan)
        return unknown, unknown
    apart = np.clip(trainer.astype(np.float64) - output.logprobs, -_LARGEST, _LARGEST)
    return np.expm1(apart) - apart, np.abs(apart)


def _runs(output: Output) -> Iterable[tuple[int, int, int, Sampler]]:
    """Start, end, weight version and sampler of each run of tokens for which both are the same."""
    samplers = output.samplers or ((0, Sampler()),)
    ends = [*(start for start, _ in samplers[1:]), output.tokens]
    at = 0
    for count, version in output.versions:
        for (start, sampler), end in zip(samplers, ends, strict=True):
            first, last = max(at, start), min(at + count, end)
            if first < last:
                yield first, last, version, sampler
        at += count


def ratio_of(log_ratio: float) -> float:
    """The ratio whose logarithm this is, at least 1."""
    return math.exp(log_ratio)


class Drawn(NamedTuple):
    """A sampler, as one trainer sees it."""

    trainer: str
    sampler: Sampler


@dataclass(slots=True)
class Seen:
    """The last turns of a sampler: sums and squares of the mean KL of each, and the largest log ratio."""

    turns: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW_TURNS))
    version: int = 0

    @property
    def kl(self) -> float:
        """The mean over turns."""
        return math.fsum(kl for kl, _, _ in self.turns) / len(self.turns)

    @property
    def error(self) -> float:
        """The standard error of `kl`."""
        mean = self.kl
        spread = math.fsum((kl - mean) ** 2 for kl, _, _ in self.turns)
        return math.sqrt(spread / max(len(self.turns) - 1, 1) / len(self.turns))

    @property
    def log_ratio(self) -> float:
        """The largest of these turns."""
        return max(log_ratio for _, log_ratio, _ in self.turns)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.turns)


class Mismatch:
    """The last turns of each sampler that trainers told about, and which samplers are named.

    A sampler is named if its KL is above `limit`, or above a share of it and several times that of the other samplers
    of the same trainer. Either must hold by four standard errors, over at least 20 turns.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.seen: dict[Drawn, Seen] = {}

    def add(self, trainer: str, parts: Sequence[Part]) -> None:
        """Add a turn that a trainer told about."""
        by: dict[Sampler, list[Part]] = {}
        for part in parts:
            if part.compared:
                by.setdefault(part.sampler, []).append(part)
        for sampler, found in by.items():
            key = Drawn(trainer, sampler)
            seen = self.seen.pop(key, None) or Seen()
            tokens = sum(part.compared for part in found)
            seen.turns.append((sum(part.kl for part in found) / tokens, max(part.log_ratio for part in found), tokens))
            seen.version = max(part.version for part in found)
            self.seen[key] = seen
            if len(self.seen) > _MOST_SAMPLERS:
                del self.seen[next(iter(self.seen))]

    def named(self) -> list[Drawn]:
        """The samplers to blame."""
        return [key for key, seen in self.seen.items() if self._is_wrong(key, seen)]

    def _is_wrong(self, key: Drawn, seen: Seen) -> bool:
        if len(seen.turns) < _FEWEST_TURNS:
            return False
        least = seen.kl - _ERRORS * seen.error
        if least > self.limit:
            return True
        others = [
            other
            for drawn, other in self.seen.items()
            if drawn != key and drawn.trainer == key.trainer and len(other.turns) >= _FEWEST_TURNS
        ]
        if not others or least <= _FLOOR * self.limit:
            return False
        return least > _TIMES * min(other.kl + _ERRORS * other.error for other in others)
