"""The metrics of a worker, in the format of TRL's trainer: numbers, and pairs that are divided over a step."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Sequence

from tokengrove.rollout.episodes import EpisodeResult

Value = float | tuple[float, float]
_MOST = 4096


class Metrics:
    """A queue for the trainer. If it is full, the oldest values are dropped."""

    def __init__(self) -> None:
        self.queue: queue.Queue[dict[str, Value]] = queue.Queue(_MOST)

    def put(self, values: dict[str, Value]) -> None:
        while True:
            try:
                self.queue.put_nowait(values)
                return
            except queue.Full:
                try:
                    self.queue.get_nowait()
                except queue.Empty:
                    continue


def of_group(results: Sequence[EpisodeResult]) -> dict[str, Value]:
    """The metrics of a group's episodes. Values whose name has `total` are summed over a step; pairs are divided."""
    played = [result for result in results if result.turns]
    count = float(len(played))
    lengths = [result.output_tokens for result in played]
    failures = Counter(f"rollout/failed_{result.failure}_total" for result in results if result.failure)
    if failures:
        failures["rollout/failed_episodes_total"] = failures.total()
    rates: dict[str, Value] = {
        "rollout/turns_mean": (float(sum(result.turns for result in played)), count),
        "rollout/duration_s": (sum(result.seconds for result in played), count),
        "completions/mean_length": (float(sum(lengths)), count),
    }
    extremes: dict[str, Value] = {
        "completions/max_length": float(max(lengths, default=0)),
        "completions/min_length": float(min(lengths, default=0)),
    }
    return {**(rates | extremes if played else {}), **{name: float(number) for name, number in failures.items()}}
