"""The statistics of a run, updated after each episode."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import comb
from typing import Any

from tokengrove.rollout.episodes import EpisodeResult

GroupKey = tuple[int, str]
"""The pass over the data, from 0, and the task's id."""


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Summary:
    """Counts of a run, updated while it runs.

    `done`: episodes played to their end; `failures`: episodes with a failed last attempt, by kind; `retries`: failed
    attempts that were retried, by kind; `earlier`: the part of `done` and `failures` that an earlier start played.
    `turns`, `prompt_tokens` and `output_tokens` include failed episodes, but not attempts that were retried.
    `examples`: the first failed episode of each kind, with its message. `failed` and `allowed` determine the exit code.
    """

    name: str | None
    episodes: int
    group_size: int
    success: float
    allowed: int = 0
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    earlier: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None
    output: str | None = None
    export: dict[str, Any] | None = None
    _begun: float = 0.0
    _ended: float | None = None
    _tokens_here: int = 0
    _rewards: _Mean = field(default_factory=_Mean)
    _seconds: _Mean = field(default_factory=_Mean)
    _scores: dict[str, _Mean] = field(default_factory=lambda: defaultdict(_Mean))
    _groups: dict[GroupKey, Counter[bool]] = field(default_factory=lambda: defaultdict(Counter))

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def add(self, group: GroupKey, result: EpisodeResult, *, earlier: bool = False) -> None:
        """Count the last attempt at an episode."""
        self.earlier += earlier
        self.turns += result.turns
        self.prompt_tokens += result.prompt_tokens
        self.output_tokens += result.output_tokens
        self._tokens_here += 0 if earlier else result.output_tokens
        self._seconds.add(result.seconds)
        for name, score in result.scores.items():
            self._scores[name].add(score)
        if result.failure is not None:
            self.failures[result.failure] += 1
            self.examples.setdefault(result.failure, _told(result))
        else:
            self.done += 1
            if result.reward is not None:
                self._rewards.add(result.reward)
        self._groups[group][_passed(result, self.success)] += 1

    def end(self) -> None:
        """Stop the clock."""
        self._ended = self.clock()

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def ended(self) -> int:
        """Episodes that have ended, with or without failure."""
        return self.done + self.failed

    @property
    def complete(self) -> bool:
        return self.ended == self.episodes

    @property
    def succeeded(self) -> bool:
        """Whether all episodes were played, with no more failures than allowed."""
        return self.complete and self.stopped is None and self.failed <= self.allowed

    def exportable(self, with_failed: bool) -> bool:
        """Whether there is an episode to export."""
        return bool(self.ended if with_failed else self.done)

    @property
    def rewarded(self) -> int:
        """Episodes played to their end that have a reward."""
        return self._rewards.count

    @property
    def mean_reward(self) -> float | None:
        """The mean over the episodes played to their end that have a reward."""
        return self._rewards.value

    @property
    def mean_reward_with_failures(self) -> float | None:
        """The mean reward with failed episodes as 0."""
        count = self._rewards.count + self.failed
        return self._rewards.total / count if self._rewards.count else None

    @property
    def scores(self) -> dict[str, float]:
        """The mean of each named score, over the episodes that have it."""
        return {name: mean.total / mean.count for name, mean in sorted(self._scores.items())}

    @property
    def seconds(self) -> float:
        """The duration of this start of the run."""
        return (self.clock() if self._ended is None else self._ended) - self._begun

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second, of the episodes that this start played."""
        return self._tokens_here / self.seconds if self.seconds > 0 else 0.0

    @property
    def pass_at_k(self) -> dict[int, float]:
        """pass@k by k, over the groups that have at least k episodes.

        A failed episode, or one without a reward, did not pass. Empty if no episode has a reward.
        """
        if not self._rewards.count:
            return {}
        groups = [(passed.total(), passed[True]) for passed in self._groups.values()]
        found = {k: mean_pass_at_k(groups, k) for k in powers_up_to(self.group_size)}
        return {k: value for k, value in found.items() if value is not None}

    def as_json(self) -> dict[str, Any]:
        """All numbers in JSON's types. Values that do not exist, such as rewards or scores, are null or missing."""
        return {
            "name": self.name,
            "complete": self.complete,
            "succeeded": self.succeeded,
            "stopped": self.stopped,
            "episodes": self.episodes,
            "done": self.done,
            "failed": self.failed,
            "not_played": self.episodes - self.ended,
            "earlier": self.earlier,
            "failures": dict(self.failures),
            "failure_examples": dict(self.examples),
            "retries": dict(self.retries),
            "rewarded": self.rewarded,
            "mean_reward": self.mean_reward,
            "mean_reward_with_failures": self.mean_reward_with_failures,
            "success": self.success,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "scores": self.scores,
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "mean_episode_seconds": self._seconds.value,
            "output": self.output,
            "export": self.export,
        }


def _passed(result: EpisodeResult, success: float) -> bool:
    return result.failure is None and result.reward is not None and result.reward >= success


def _told(result: EpisodeResult) -> str:
    """A failure in one line."""
    message = " ".join((result.message or "").split())
    return f"task {result.task_id}, sample {result.sample}: {message}"


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples of a task passes.

    It is 1 - C(n - c, k) / C(n, k) for n samples of which c passed: Chen et al., "Evaluating Large Language Models
    Trained on Code" (2021, arXiv:2107.03374, equation 1). Raises ValueError unless 0 <= passed <= samples and
    1 <= k <= samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples and no more passed than samples: {passed} of {samples}")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at_k(tasks: Iterable[tuple[int, int]], k: int) -> float | None:
    """The mean over the tasks, each `(samples, passed)`, that have at least k samples; None without any."""
    found = [pass_at_k(samples, passed, k) for samples, passed in tasks if samples >= k]
    return sum(found) / len(found) if found else None


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... up to and including `most`."""
    found = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
    return found if found and found[-1] == most else [*found, most]
