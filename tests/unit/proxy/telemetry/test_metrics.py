"""The text that Prometheus reads."""

from __future__ import annotations

import pickle

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from proxy.telemetry.families import Counts, Gauge, Histogram, Merge
from proxy.telemetry.metrics import Metrics
from proxy.types import Api
from tokengrove.reasons import Reason, Status

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


async def lines(metrics: Metrics, name: str, accept: str = "") -> list[str]:
    text, _ = metrics.text(await metrics.now(), accept)
    return [line for line in text.decode().splitlines() if line.startswith(name)]


async def test_counts_carry_their_labels() -> None:
    metrics = Metrics()
    metrics.turns.ended.by[Api.CHAT, Status.COMPLETE] += 2
    metrics.turns.ended.by[Api.MESSAGES, Status.FAILED] += 1
    metrics.turns.interactions.by[(Reason.FIRST,)] += 3
    metrics.turns.tokens.by[("prompt",)] += 40
    metrics.turns.in_flight.watch(lambda: 1)
    assert await lines(metrics, "tokengrove_turns_total") == [
        'tokengrove_turns_total{api="chat",status="complete"} 2.0',
        'tokengrove_turns_total{api="messages",status="failed"} 1.0',
    ]
    assert await lines(metrics, "tokengrove_interactions_total") == [
        'tokengrove_interactions_total{reason="first"} 3.0'
    ]
    assert await lines(metrics, "tokengrove_tokens_total") == ['tokengrove_tokens_total{kind="prompt"} 40.0']
    assert await lines(metrics, "tokengrove_in_flight") == ["tokengrove_in_flight 1.0"]
    assert await lines(metrics, "tokengrove_malformed_calls_total") == ["tokengrove_malformed_calls_total 0.0"]


async def test_a_duration_counts_in_every_bucket_from_its_bound_on() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.01, 0.011, 700.0):
        metrics.turns.duration.observe(seconds)
    shown = await lines(metrics, "tokengrove_turn_seconds")
    counts = {line.partition("le=")[2].partition("}")[0]: line.split()[-1] for line in shown}
    assert counts['"0.005"'] == "1.0" and counts['"0.01"'] == "2.0" and counts['"0.025"'] == "3.0"
    assert counts['"600.0"'] == "3.0" and counts['"+Inf"'] == "4.0"
    assert await lines(metrics, "tokengrove_turn_seconds_count") == ["tokengrove_turn_seconds_count 4.0"]
    sums = await lines(metrics, "tokengrove_turn_seconds_sum")
    assert float(sums[0].split()[-1]) == 0.0 + 0.01 + 0.011 + 700.0


async def test_engine_servers_are_shown_by_state_and_one_by_one_where_there_are_any() -> None:
    metrics = Metrics()
    assert not await lines(metrics, "tokengrove_engine_server")
    metrics.engine.see(
        [
            {
                "url": "http://a:1",
                "state": "alive",
                "in_flight": 2,
                "version": 7,
                "prompt_tokens": 9,
                "cached_tokens": 6,
            },
            {
                "url": "http://b:1",
                "state": "failing",
                "in_flight": 0,
                "version": 6,
                "prompt_tokens": 0,
                "cached_tokens": 0,
            },
            {"url": "http://c:1", "state": "missing", "failure": "no answer"},
        ]
    )
    assert await lines(metrics, "tokengrove_engine_server") == [
        'tokengrove_engine_servers{state="alive"} 1.0',
        'tokengrove_engine_servers{state="failing"} 1.0',
        'tokengrove_engine_servers{state="ejected"} 0.0',
        'tokengrove_engine_servers{state="leaving"} 0.0',
        'tokengrove_engine_servers{state="missing"} 1.0',
        'tokengrove_engine_server_up{server="http://a:1"} 1.0',
        'tokengrove_engine_server_up{server="http://b:1"} 0.0',
        'tokengrove_engine_server_up{server="http://c:1"} 0.0',
        'tokengrove_engine_server_in_flight{server="http://a:1"} 2.0',
        'tokengrove_engine_server_in_flight{server="http://b:1"} 0.0',
        'tokengrove_engine_server_weight_version{server="http://a:1"} 7.0',
        'tokengrove_engine_server_weight_version{server="http://b:1"} 6.0',
        'tokengrove_engine_server_prompt_tokens_total{server="http://a:1"} 9.0',
        'tokengrove_engine_server_prompt_tokens_total{server="http://b:1"} 0.0',
        'tokengrove_engine_server_cached_tokens_total{server="http://a:1"} 6.0',
        'tokengrove_engine_server_cached_tokens_total{server="http://b:1"} 0.0',
    ]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_no_series_says_when_a_metric_was_created(accept: str) -> None:
    metrics = Metrics()
    metrics.turns.duration.observe(1.0)
    text, _ = metrics.text(await metrics.now(), accept)
    assert b"_created" not in text


async def test_openmetrics_is_given_to_whoever_asks_for_it() -> None:
    metrics = Metrics()
    plain, plain_type = metrics.text(await metrics.now(), "*/*")
    text, media_type = metrics.text(await metrics.now(), f"{OPENMETRICS},text/plain;version=0.0.4;q=0.5")
    assert plain_type == "text/plain; version=0.0.4; charset=utf-8" and b"# EOF" not in plain
    assert media_type.startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in text_string_to_metric_families(text.decode())} == {
        family.name for family in metrics.families
    }


async def test_the_numbers_of_processes_add_up_by_their_meaning() -> None:
    one, other, gone = Metrics(), Metrics(), Metrics()
    for number, metrics in enumerate((one, other, gone), 1):
        metrics.store.started.by[()] += number
        metrics.turns.duration.observe(float(number))
        metrics.turns.in_flight.watch(lambda number=number: number)  # type: ignore[misc]
        metrics.engine.paused.watch(lambda number=number: number == 2)  # type: ignore[misc]
        metrics.engine.server_up.by = {("http://a:1",): float(number != 2)}
        metrics.sessions.stored.by = {("waiting",): number}
    alive = [await one.now(), pickle.loads(pickle.dumps(await other.now()))]
    total = one.total(alive, [await gone.now()])
    assert total["tokengrove_sessions_started"] == {(): 1 + 2 + 3}
    counts, seconds = total["tokengrove_turn_seconds"][()]
    assert sum(counts) == 3 and seconds == 6.0
    assert total["tokengrove_in_flight"] == {(): 1 + 2}, "a process that is gone runs nothing"
    assert total["tokengrove_engine_paused"] == {(): True}
    assert total["tokengrove_engine_server_up"] == {("http://a:1",): 0.0}
    assert total["tokengrove_stored_sessions"] == {("waiting",): 1}, "all of them read the same database"


def test_what_is_read_does_not_change_with_later_counts() -> None:
    counts, gauge, histogram = Counts("c", ""), Gauge("g", "", merge=Merge.OWN), Histogram("h", "", "kind")
    histogram.observe(1.0, "a")
    read = [counts.now(), gauge.now(), histogram.now()]
    before = pickle.dumps(read)
    counts.by[()] += 1
    gauge.by[()] = 1
    histogram.observe(1.0, "a")
    assert pickle.dumps(read) == before
