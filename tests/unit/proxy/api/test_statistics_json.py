"""Rates and quantiles are of the time that they name, and of nothing before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from proxy.api.statistics import Statistics
from proxy.api.statistics_json import history_json, rates_json
from proxy.telemetry.families import SECONDS
from proxy.telemetry.history import COUNTED, EVERY_S, SAMPLES, Sample

NOW = 1_000_000.0
SLOT = int(NOW) // EVERY_S


def sample(ago: int, turns: int = 0, waits: dict[int, int] | None = None) -> Sample:
    """The sample that ended `ago` samples before now; `waits`: turns by bucket of their time to first token."""
    buckets = [(waits or {}).get(bucket, 0) for bucket in range(len(SECONDS) + 1)]
    counted = [turns if name == "turns" else 0 for name in COUNTED]
    return Sample(SLOT - ago, [*counted, *buckets], (0, 0))


def test_rates_are_of_the_last_half_minute() -> None:
    samples = [sample(ago, turns=1000 if ago > 6 else 3) for ago in range(20, -1, -1)]
    found = rates_json(samples, NOW)
    assert (found["turns_per_s"], found["over_s"]) == (3 / EVERY_S, 7 * EVERY_S)


def test_both_quantiles_are_of_the_minute_before() -> None:
    samples = [sample(12, waits={9: 50}), sample(11, waits={0: 19, 3: 1}), *(sample(ago) for ago in range(10, -1, -1))]
    found = history_json(samples, NOW - EVERY_S)
    [p50], [p95] = found["first_token_p50_s"], found["first_token_p95_s"]
    assert 0 < p50 < p95 <= SECONDS[0]
    slow = history_json([sample(0, waits={0: 9, 3: 1})], 0.0)
    assert slow["first_token_p50_s"][0] <= SECONDS[0] < SECONDS[2] < slow["first_token_p95_s"][0] <= SECONDS[3]


async def test_an_hour_of_samples_is_kept_and_a_late_worker_corrects_the_newest() -> None:
    asked: list[int] = []
    answers = [[sample(ago, turns=1) for ago in range(SAMPLES - 1, -1, -1)]]
    answers.append([sample(ago, turns=2) for ago in (3, 2, 1, 0, -1)])

    async def samples(begin: int) -> list[Sample]:
        asked.append(begin)
        return answers.pop(0)

    nothing: Any = None
    read = Statistics(nothing, nothing, cast(Any, SimpleNamespace(samples=samples)), nothing, nothing, nothing)
    assert len(await read._look_back(NOW + EVERY_S)) == SAMPLES
    found = await read._look_back(NOW + 2 * EVERY_S)
    assert asked == [0, SLOT - 3]
    assert len({each.slot for each in found}) == len(found) == SAMPLES
    assert [each.counted[0] for each in found[-6:]] == [1, 2, 2, 2, 2, 2]
    assert found[-1] not in await _unsettled(found[-1])


async def _unsettled(newest: Sample) -> list[Sample]:
    """What is shown a moment after the end of a sample, which not every worker has taken yet."""

    async def samples(begin: int) -> list[Sample]:
        return [newest]

    nothing: Any = None
    read = Statistics(nothing, nothing, cast(Any, SimpleNamespace(samples=samples)), nothing, nothing, nothing)
    return await read._look_back(newest.at + 0.1)
