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
    """The last turns of a sampler: the mean KL, the largest log ratio and the tokens of each.

    `kl`: the mean over turns; `error`: its standard error. `version`: the largest weight version of the newest turn.
    """

    turns: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW_TURNS))
    kl: float = 0.0
    error: float = 0.0
    version: int = 0

    def add(self, kl: float, log_ratio: float, tokens: int) -> None:
        """Add a turn."""
        self.turns.append((kl, log_ratio, tokens))
        count = len(self.turns)
        self.kl = math.fsum([each for each, _, _ in self.turns]) / count
        squares = math.fsum([(each - self.kl) ** 2 for each, _, _ in self.turns])
        self.error = math.sqrt(squares / max(count - 1, 1) / count)

    @property
    def log_ratio(self) -> float:
        """The largest of these turns."""
        return max(log_ratio for _, log_ratio, _ in self.turns)

    @property
    def least(self) -> float:
        """What the mean is at least, but for chance."""
        return self.kl - _ERRORS * self.error

    @property
    def most(self) -> float:
        """What the mean is at most, but for chance."""
        return self.kl + _ERRORS * self.error


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
            kl = math.fsum([part.kl for part in found]) / tokens
            seen.add(kl, max([part.log_ratio for part in found]), tokens)
            seen.version = max(part.version for part in found)
            self.seen[key] = seen
            if len(self.seen) > _MOST_SAMPLERS:
                del self.seen[next(iter(self.seen))]

    def named(self) -> list[Drawn]:
        """The samplers to blame."""
        judged = {key: seen for key, seen in self.seen.items() if len(seen.turns) >= _FEWEST_TURNS}
        lowest: dict[str, list[float]] = {}
        for key, seen in judged.items():
            lowest[key.trainer] = sorted([*lowest.get(key.trainer, []), seen.most])[:2]
        return [key for key, seen in judged.items() if self._is_wrong(seen, lowest[key.trainer])]

    def _is_wrong(self, seen: Seen, lowest: list[float]) -> bool:
        """`lowest`: the two lowest of what the samplers of a trainer have at most, this one among them."""
        if seen.least > self.limit:
            return True
        others = [most for most in lowest if most != seen.most]
        return bool(others) and seen.least > max(_FLOOR * self.limit, _TIMES * others[0])
