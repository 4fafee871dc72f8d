"""What the log says of engine servers, pauses and weights: each event once, and little of a server that flaps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from proxy.engine.interface import PauseMode
from proxy.engine.servers.events import ServerEvents
from tests.engines.gates import AdminGate
from tests.engines.pools import of_session, pool_of, states, wires
from tests.support import until

Told = Callable[[], list[tuple[str, Mapping[str, Any]]]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The events since the last call, each with its fields."""
    caplog.set_level(logging.INFO, "proxy.engine")

    def since() -> list[tuple[str, Mapping[str, Any]]]:
        events = [(record.getMessage(), record.args or {}) for record in caplog.records]
        caplog.clear()
        return events  # type: ignore[return-value]

    return since


def test_a_server_that_keeps_changing_has_a_few_lines_a_minute_and_one_that_counts_them(told: Told) -> None:
    now = [0.0]
    events = ServerEvents(clock=lambda: now[0])
    for second in range(50):
        now[0] = second
        events.warning("engine server is lost", "http://a", reason="gone")
        events.info("engine server joined", "http://a")
        events.sweep()
    events.info("engine server joined", "http://b")
    assert [fields["server"] for _, fields in told()] == ["http://a"] * 4 + ["http://b"]
    now[0] = 60.0
    events.sweep()
    assert told() == [
        (
            "engine server keeps changing",
            {"server": "http://a", "changes": 100, "latest": "engine server joined"},
        )
    ]
    events.warning("engine server is lost", "http://a", reason="gone")
    assert len(told()) == 1


def test_lost_requests_are_counted_for_each_server_and_told_together(told: Told) -> None:
    now = [0.0]
    events = ServerEvents(clock=lambda: now[0])
    for _ in range(30):
        events.lost("http://a", "broken pipe")
    now[0] = 5.0
    events.sweep()
    assert told() == []
    now[0] = 10.0
    events.sweep()
    events.sweep()
    event = "engine server lost requests, which are submitted again"
    assert told() == [(event, {"server": "http://a", "requests": 30, "reason": "broken pipe"})]


def test_a_reason_says_nothing_of_an_answer_that_it_quotes(told: Told) -> None:
    now = [0.0]
    events = ServerEvents(clock=lambda: now[0])
    events.warning("engine server is lost", "http://a", reason="the answer is not JSON: b'Once upon a time'")
    events.alive(False, "http://a failed in '/generate': 'Once upon'")
    events.lost("http://a", "the answer is not JSON: 'Once upon a time'")
    now[0] = 10.0
    events.sweep()
    assert [fields["reason"] for _, fields in told()] == [
        "the answer is not JSON: '...'",
        "http://a failed in '/generate': '...'",
        "the answer is not JSON: '...'",
    ]


def test_a_process_that_follows_another_one_tells_nothing_of_its_servers(told: Told) -> None:
    events = ServerEvents(quiet=lambda: True)
    events.warning("engine server is lost", "http://a")
    events.alive(False, "gone")
    assert told() == []


async def test_the_death_and_the_return_of_the_only_server_are_told(told: Told) -> None:
    async with wires(1) as (wire,), pool_of(wire.url) as pool:
        lacks, joined = told()
        assert lacks[0] == "engine server lacks a flag" and "--grammar-backend" in lacks[1]["reason"]
        assert (joined[0], joined[1]["server"]) == ("engine server joined", wire.url)
        await wire.kill()
        await until(lambda: states(pool)[wire.url] == "ejected")
        lost, down = told()
        assert lost[0] == "engine server is lost" and lost[1]["server"] == wire.url and lost[1]["reason"]
        assert down[0] == "all engine servers are down" and wire.url in down[1]["reason"]
        await wire.start()
        await until(lambda: states(pool)[wire.url] == "alive")
        joined, back = told()
        assert joined[0] == "engine server joined"
        assert back[0] == "engine servers are back" and back[1]["first"] == wire.url and back[1]["down_s"] >= 0


async def test_pauses_weights_and_memory_are_told_with_their_numbers(told: Told) -> None:
    async with wires(1, delay_s=0.01) as (wire,), pool_of(wire.url) as pool:
        gate = AdminGate(pool)
        told()
        reading = asyncio.create_task(gate.read(of_session("s")))
        await until(lambda: gate.running == 1)
        await gate.admin.pause(PauseMode.IN_PLACE)
        waiting = asyncio.create_task(gate.read(of_session("t")))
        await until(lambda: gate.waiting == 1)
        await gate.admin.update_weights("/weights/7", 7, PauseMode.ABORT)
        await gate.admin.resume()
        await asyncio.gather(reading, waiting)
        await gate.admin.flush_cache()
        await gate.admin.release_memory(("weights",), PauseMode.ABORT)
        await gate.admin.resume_memory(())
        paused, updated, resumed, flushed, again, released, taken, over = told()
        assert paused == ("engine paused", {"mode": "in_place", "in_flight": 1})
        assert updated[0] == "weights updated" and updated[1].items() >= {"before": 0, "version": 7}.items()
        assert resumed[0] == "engine resumed" and resumed[1].items() >= {"mode": "in_place", "waiting": 1}.items()
        assert flushed[0] == "prefix cache flushed"
        assert again == ("engine paused", {"mode": "abort", "in_flight": 0})
        assert released == ("engine memory released", {"released": "weights"})
        assert taken == ("engine memory resumed", {"still_released": None})
        assert over[0] == "engine resumed" and over[1]["waiting"] == 0
