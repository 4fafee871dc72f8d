"""Samples of what a process counted, five seconds each."""

from __future__ import annotations

import pickle

from proxy.api.statistics_json import quantile
from proxy.telemetry.history import COUNTED, EVERY_S, FIRST_TOKEN, SAMPLES, History, Sample, added
from proxy.telemetry.metrics import Metrics
from proxy.types import Api
from tokengrove.reasons import Reason, Status

T = 1_000_000.0
SLOT = 200_000


def counted(sample: Sample, name: str) -> float:
    return sample.counted[COUNTED.index(name)]


def count_a_fork(metrics: Metrics) -> None:
    metrics.turns.ended.by[Api.CHAT, Status.COMPLETE] += 1
    metrics.turns.interactions.by[(Reason.BRANCHED,)] += 1
    metrics.turns.tokens.by[("output",)] += 40
    metrics.turns.first_token.observe(0.3)
    metrics.http.errors.by[("timeout",)] += 1


def test_a_sample_has_what_was_counted_since_the_one_before() -> None:
    metrics = Metrics()
    metrics.turns.ended.by[Api.CHAT, Status.COMPLETE] += 5
    history = History(metrics.turns, metrics.engine, metrics.http)
    metrics.turns.in_flight.watch(lambda: 3)
    count_a_fork(metrics)
    history.take(T)
    metrics.turns.interactions.by[(Reason.CONTINUED,)] += 1
    metrics.turns.ended.by[Api.MESSAGES, Status.FAILED] += 2
    history.take(T + EVERY_S)
    first, second = history.since(0)
    assert {name: counted(first, name) for name in COUNTED if counted(first, name)} == {
        **{"turns": 1, "output_tokens": 40, "forks": 1, "errors": 1},
    }
    assert sum(first.counted[FIRST_TOKEN:]) == 1 and sum(second.counted[FIRST_TOKEN:]) == 0
    assert {name: counted(second, name) for name in COUNTED if counted(second, name)} == {"failed": 2}
    assert (first.at, second.at) == (T, T + EVERY_S)
    assert first.measured[0] == 3


def test_an_hour_is_kept_and_the_newest_are_found() -> None:
    metrics = Metrics()
    for number in range(SAMPLES + 10):
        metrics.history.take(T + number * EVERY_S)
    assert len(metrics.history.since(0)) == SAMPLES
    assert [each.slot for each in metrics.history.since(SLOT + SAMPLES + 7)] == [SLOT + SAMPLES + n for n in (7, 8, 9)]


def test_nothing_is_lost_when_the_clock_is_set_back() -> None:
    metrics = Metrics()
    for now in (T, T - 600, T + EVERY_S):
        count_a_fork(metrics)
        metrics.history.take(now)
    assert [(each.slot, counted(each, "turns")) for each in metrics.history.since(0)] == [(SLOT, 2), (SLOT + 1, 1)]


def test_samples_of_two_processes_add_up_also_when_one_is_younger() -> None:
    old, new = Metrics(), Metrics()
    old.history.take(T)
    for metrics in (old, new):
        count_a_fork(metrics)
        metrics.history.take(T + EVERY_S)
    sent = pickle.loads(pickle.dumps(new.history.since(0)))
    both = added([old.history.since(0), sent])
    assert [(each.slot, counted(each, "turns"), counted(each, "output_tokens")) for each in both] == [
        (SLOT, 0, 0),
        (SLOT + 1, 2, 80),
    ]
    assert sum(both[1].counted[FIRST_TOKEN:]) == 2


def test_what_there_is_adds_up_over_processes_oldest_first() -> None:
    old, new = (
        [Sample(slot, [0] * len(COUNTED), measured) for slot, measured in slots]
        for slots in ([(7, (5, 1)), (8, (2, 0))], [(6, (1, 1)), (7, (3, 4))])
    )
    found = [(each.slot, list(each.measured)) for each in added([old, new])]
    assert found == [(6, [1, 1]), (7, [8, 5]), (8, [2, 0])]


def test_two_samples_of_one_moment_are_one() -> None:
    metrics = Metrics()
    for now in (T, T + 0.1):
        count_a_fork(metrics)
        metrics.history.take(now)
    assert [(each.slot, counted(each, "turns")) for each in metrics.history.since(0)] == [(SLOT, 2)]


def test_a_quantile_is_linear_within_its_bucket() -> None:
    assert quantile(0.5, (1.0, 2.0, 4.0), (0, 0, 0, 0)) is None
    assert quantile(0.5, (1.0, 2.0, 4.0), (0, 10, 0, 0)) == 1.5
    assert quantile(0.95, (1.0, 2.0, 4.0), (50, 40, 10, 0)) == 3.0
    assert quantile(0.95, (1.0, 2.0, 4.0), (0, 0, 0, 7)) == 4.0  # more is not known
