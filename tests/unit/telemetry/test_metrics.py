"""The text that Prometheus reads."""

from __future__ import annotations

from proxy.reasons import Reason, Status
from proxy.telemetry.metrics import Metrics
from proxy.types import Api


def lines(metrics: Metrics, name: str) -> list[str]:
    return [line for line in metrics.text().decode().splitlines() if line.startswith(name)]


def test_counts_carry_their_labels() -> None:
    metrics = Metrics()
    metrics.turns[Api.CHAT, Status.COMPLETE] += 2
    metrics.turns[Api.MESSAGES, Status.FAILED] += 1
    metrics.reasons[Reason.FIRST] += 3
    metrics.tokens["prompt"] += 40
    metrics.in_flight += 1
    metrics.waiting += 2
    assert lines(metrics, "tokengrove_turns_total") == [
        'tokengrove_turns_total{api="chat",status="complete"} 2.0',
        'tokengrove_turns_total{api="messages",status="failed"} 1.0',
    ]
    assert lines(metrics, "tokengrove_interactions_total") == ['tokengrove_interactions_total{reason="first"} 3.0']
    assert lines(metrics, "tokengrove_tokens_total") == ['tokengrove_tokens_total{kind="prompt"} 40.0']
    assert lines(metrics, "tokengrove_in_flight") == ["tokengrove_in_flight 1.0"]
    assert lines(metrics, "tokengrove_waiting") == ["tokengrove_waiting 2.0"]
    assert lines(metrics, "tokengrove_malformed_calls_total") == ["tokengrove_malformed_calls_total 0.0"]


def test_a_duration_counts_in_every_bucket_from_its_bound_on() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.01, 0.011, 700.0):
        metrics.duration.observe(seconds)
    counts = {
        line.partition("le=")[2].partition("}")[0]: line.split()[-1] for line in lines(metrics, "tokengrove_turn")
    }
    assert counts['"0.005"'] == "1.0" and counts['"0.01"'] == "2.0" and counts['"0.025"'] == "3.0"
    assert counts['"600.0"'] == "3.0" and counts['"+Inf"'] == "4.0"
    assert lines(metrics, "tokengrove_turn_seconds_count") == ["tokengrove_turn_seconds_count 4.0"]
    assert float(lines(metrics, "tokengrove_turn_seconds_sum")[0].split()[-1]) == 0.0 + 0.01 + 0.011 + 700.0


def test_engine_servers_are_counted_by_state_where_there_are_any() -> None:
    metrics = Metrics()
    assert not lines(metrics, "tokengrove_engine_servers")
    metrics.servers.update(["alive", "failing", "alive"])
    assert lines(metrics, "tokengrove_engine_servers") == [
        'tokengrove_engine_servers{state="alive"} 2.0',
        'tokengrove_engine_servers{state="failing"} 1.0',
    ]
