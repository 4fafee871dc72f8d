"""Whatever happens to the engine, each request gets exactly the tokens that it would have got undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply, complete
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.errors import EngineLost, EngineTimeout, EngineUnavailable, InvalidRequest
from proxy.turns.generation import sample
from proxy.types import FinishReason
from tests.engines.gates import AdminGate
from tests.support import let_pass, until
from tests.unit.engine.gated import (
    HoldingEngine,
    RefusingEngine,
    StubbornEngine,
    WatchfulEngine,
    asking,
    gate_of,
    uninterrupted,
)

CUTTING = [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT]


async def some_tokens(gate: AdminGate, reply: CollectedReply, request: GenerateRequest) -> None:
    """Read a request into `reply`, to its end."""
    async with aclosing(cast("AsyncGenerator[TokenChunk, None]", gate.generate(request))) as chunks:
        async for chunk in chunks:
            reply.add(chunk)


async def begun(
    gate: AdminGate, request: GenerateRequest, tokens: int = 3
) -> tuple[CollectedReply, asyncio.Task[None]]:
    """A request in flight, of which some tokens are there."""
    reply = CollectedReply()
    task = asyncio.create_task(some_tokens(gate, reply, request))
    await until(lambda: len(reply.ids) >= tokens or task.done())
    return reply, task


@pytest.mark.parametrize("mode", CUTTING)
async def test_a_pause_stops_sampling_and_nothing_is_lost_when_it_goes_on(mode: PauseMode) -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(mode)
    assert gate.paused is mode and engine.paused
    await asyncio.sleep(0.01)
    stopped_at = len(reply.ids)
    await asyncio.sleep(0.02)
    assert len(reply.ids) == stopped_at < 60 and reply.finish is None
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request) and reply.finish is FinishReason.LENGTH
    assert gate.paused is None and not engine.trespassers
    assert len(engine.requests) == (2 if mode is PauseMode.ABORT else 1)


async def test_what_abort_cut_goes_on_with_prompt_plus_tokens_and_the_rest_of_the_budget() -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(PauseMode.ABORT)
    await until(lambda: gate.running == 0)
    so_far = list(reply.ids)
    await gate.admin.resume()
    await task
    again = engine.requests[1]
    assert list(again.input_ids) == [*request.input_ids, *so_far]
    assert again.sampling.max_tokens == 60 - len(so_far)
    assert (again.request_id, again.session_id) == (request.request_id, request.session_id)


async def test_drain_waits_for_what_runs_and_lets_nobody_in_meanwhile() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    reply, task = await begun(gate, asking("a", 40))
    pausing = asyncio.create_task(gate.admin.pause(PauseMode.DRAIN))
    await until(lambda: not gate._open.is_set())
    late = asyncio.create_task(complete(gate, asking("b", 5)))
    await pausing
    assert reply.finish is FinishReason.LENGTH and len(reply.ids) == 40 and gate.waiting == 1
    assert [request.request_id for request in engine.requests] == ["a"]
    await gate.admin.resume()
    assert (await late).ids == uninterrupted(asking("b", 5))
    await task


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_update_leaves_every_reply_as_it_was_and_versions_in_order(mode: PauseMode) -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    requests = [asking(f"r{n}", 40, start=20 * n + 1) for n in range(4)]
    running = [await begun(gate, request) for request in requests]
    assert await gate.admin.update_weights("/weights", None, mode) == 1
    await asyncio.gather(*(task for _, task in running))
    for request, (reply, _) in zip(requests, running, strict=True):
        assert reply.ids == uninterrupted(request)
        assert reply.versions == sorted(reply.versions)
        assert set(reply.versions) == ({0} if mode is PauseMode.DRAIN else {0, 1})
    assert (await complete(gate, asking("after", 3))).versions == [1, 1, 1]
    assert gate.paused is None


async def test_an_update_during_a_pause_leaves_it_paused() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    await gate.admin.pause(PauseMode.IN_PLACE)
    assert await gate.admin.update_weights("/weights", 7, PauseMode.ABORT) == 7
    assert gate.paused is PauseMode.IN_PLACE and engine.paused
    await gate.admin.resume()
    assert (await complete(gate, asking("a", 2))).versions == [7, 7]


async def test_updates_on_each_others_heels_let_nobody_slip_in_between() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    await gate.admin.pause(PauseMode.DRAIN)
    waiting = [asyncio.create_task(complete(gate, asking(f"w{n}", 4))) for n in range(3)]
    await until(lambda: gate.waiting == 3)
    await gate.admin.resume()
    for _ in range(3):  # each closes the gate again before those that were woken come to run
        await gate.admin.update_weights("/weights", None, PauseMode.DRAIN)
    for reply in await asyncio.gather(*waiting):
        assert reply.versions == [3] * 4
    assert engine.trespassers == []


async def test_who_was_cut_does_not_go_on_in_a_later_pause() -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(PauseMode.ABORT)
    await until(lambda: gate.running == 0)
    await gate.admin.resume()
    await gate.admin.pause(PauseMode.DRAIN)
    await asyncio.sleep(0.01)
    assert engine.trespassers == [] and gate.running == 0 and len(engine.requests) == 1
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request)


async def test_arrivals_wait_during_a_pause_and_are_refused_after_the_limit() -> None:
    gate = gate_of(WatchfulEngine(), pause_timeout_s=0.05)
    await gate.admin.pause(PauseMode.IN_PLACE)
    with pytest.raises(EngineUnavailable, match="--pause-timeout-s") as refused:
        await complete(gate, asking("a", 3))
    assert refused.value.retry_after_s and refused.value.status == 503
    assert gate.waiting == 0
    patient = asyncio.create_task(complete(gate, asking("b", 3)))
    await until(lambda: gate.waiting == 1)
    await gate.admin.resume()
    assert (await patient).ids == uninterrupted(asking("b", 3))


@pytest.mark.parametrize("mode", CUTTING)
async def test_patience_stands_still_during_a_pause(mode: PauseMode, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(WatchfulEngine(), engine_timeout_s=60.0, pause_timeout_s=10_000.0)
    request = asking("a", 30)
    running = asyncio.create_task(sample(gate, request, 60.0))
    await until(lambda: gate.running == 1)
    await gate.admin.pause(mode)
    late = asyncio.create_task(sample(gate, asking("b", 3), 60.0))
    await until(lambda: gate.waiting == 1)
    await let_pass(3600.0, monkeypatch)
    await gate.admin.resume()
    assert list((await running).ids) == uninterrupted(request)
    assert list((await late).ids) == uninterrupted(asking("b", 3))


async def test_patience_is_back_after_a_pause() -> None:
    gate = gate_of(WatchfulEngine(tick_s=60.0), engine_timeout_s=0.05)
    running = asyncio.create_task(sample(gate, asking("a", 3), 0.05))
    await until(lambda: gate.running == 1)
    await gate.admin.pause(PauseMode.IN_PLACE)
    await gate.admin.resume()
    with pytest.raises(EngineTimeout):
        await running


async def test_an_abort_waits_for_constrained_outputs_and_cuts_the_others() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    bound, bound_task = await begun(gate, asking("bound", 30, constrained=True))
    free, free_task = await begun(gate, asking("free", 400, start=90))
    await gate.admin.pause(PauseMode.ABORT)
    assert bound.finish is FinishReason.LENGTH and bound.ids == uninterrupted(asking("bound", 30))
    assert free.finish is None
    await gate.admin.resume()
    await asyncio.gather(bound_task, free_task)
    assert free.ids == uninterrupted(asking("free", 400, start=90))
    assert [request.request_id for request in engine.requests] == ["bound", "free", "free"]


@pytest.mark.parametrize("deaths", [[0], [1], [0, 4, 0], [7, 1, 1, 1, 1], [30]])
async def test_the_death_of_servers_loses_and_doubles_no_token(deaths: list[int]) -> None:
    engine = WatchfulEngine(deaths=deaths)
    gate, request = gate_of(engine), asking("a", 30)
    reply = await complete(gate, request)
    assert reply.ids == uninterrupted(request) and reply.finish is FinishReason.LENGTH
    assert gate.running == 0
    # Nothing is asked for once all tokens are there, though nobody said that these are all.
    assert len(engine.requests) == sum(bool(death) for death in deaths) + (sum(deaths) < 30)


async def test_when_one_server_after_the_other_dies_the_request_is_given_up() -> None:
    with pytest.raises(EngineLost):
        await complete(gate_of(WatchfulEngine(deaths=[1] * 20)), asking("a", 30))


async def test_a_constrained_output_is_sent_again_only_before_its_first_token() -> None:
    whole = await complete(gate_of(WatchfulEngine(deaths=[0, 0])), asking("a", 9, constrained=True))
    assert whole.ids == uninterrupted(asking("a", 9))
    with pytest.raises(EngineLost):
        await complete(gate_of(WatchfulEngine(deaths=[2])), asking("a", 9, constrained=True))


async def test_a_death_during_a_pause_is_made_good_after_it() -> None:
    engine = WatchfulEngine(deaths=[5])
    gate, request = gate_of(engine), asking("a", 30)
    pausing: list[asyncio.Task[None]] = []
    reply = CollectedReply()
    async with aclosing(cast("AsyncGenerator[TokenChunk, None]", gate.generate(request))) as chunks:
        async for chunk in chunks:
            reply.add(chunk)
            if len(reply.ids) == 5:  # the next thing that this server does is to die
                await gate.admin.pause(PauseMode.IN_PLACE)
                pausing.append(asyncio.create_task(gate.admin.resume()))
    await asyncio.gather(*pausing)
    assert reply.ids == uninterrupted(request) and engine.trespassers == []


async def test_cached_tokens_are_those_of_the_prompt_alone() -> None:
    gate, request = gate_of(WatchfulEngine(deaths=[10])), asking("a", 30)
    assert (await sample(gate, request, 5.0)).cached_tokens == len(request.input_ids)


async def test_a_pause_that_fails_lets_everybody_go_on() -> None:
    engine = RefusingEngine()
    gate, request = gate_of(engine), asking("a", 30)
    reply, task = await begun(gate, request)
    for mode in CUTTING:
        with pytest.raises(EngineUnavailable, match="cannot pause"):
            await gate.admin.pause(mode)
        assert gate.paused is None and not engine.paused
    await task
    assert reply.ids == uninterrupted(request)
    assert (await complete(gate, asking("b", 3))).ids == uninterrupted(asking("b", 3))


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_update_that_fails_leaves_old_weights_and_everybody_going_on(mode: PauseMode) -> None:
    engine = StubbornEngine()
    gate, request = gate_of(engine), asking("a", 40)
    reply, task = await begun(gate, request)
    with pytest.raises(InvalidRequest) as refused:
        await gate.admin.update_weights("/nothing", None, mode)
    assert refused.value.param == "path"
    await task
    assert reply.ids == uninterrupted(request) and set(reply.versions) == {0}
    assert gate.paused is None and not engine.paused


async def test_a_pause_during_a_pause_and_a_resume_without_one_change_nothing() -> None:
    gate = gate_of(WatchfulEngine())
    await gate.admin.resume()
    await gate.admin.pause(PauseMode.RETRACT)
    await gate.admin.pause(PauseMode.ABORT)
    assert gate.paused is PauseMode.RETRACT
    await gate.admin.resume()
    assert (await complete(gate, asking("a", 3))).ids == uninterrupted(asking("a", 3))


async def test_closing_the_iterator_frees_the_engine_before_it_returns() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    async with aclosing(cast("AsyncGenerator[TokenChunk, None]", gate.generate(asking("a", 500)))) as chunks:
        await anext(chunks)
        assert engine.running == ["a"] and gate.running == 1
    assert engine.running == [] and gate.running == 0


@pytest.mark.parametrize("mode", CUTTING)
async def test_who_leaves_during_a_pause_is_gone_after_it(mode: PauseMode) -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    _, running = await begun(gate, asking("a", 500))
    await gate.admin.pause(mode)
    late = asyncio.create_task(complete(gate, asking("b", 500)))
    await until(lambda: gate.waiting == 1)
    for task in (running, late):
        task.cancel()
    await asyncio.gather(running, late, return_exceptions=True)
    assert (gate.waiting, gate.running, engine.running) == (0, 0, [])
    await gate.admin.resume()
    assert [request.request_id for request in engine.requests] == ["a"]
    assert (await complete(gate, asking("c", 3))).ids == uninterrupted(asking("c", 3))


async def test_a_drain_that_is_called_off_lets_requests_in_again() -> None:
    gate = gate_of(WatchfulEngine())
    reply, task = await begun(gate, asking("a", 60))
    draining = asyncio.create_task(gate.admin.pause(PauseMode.DRAIN))
    await until(lambda: not gate._open.is_set())
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    assert (await complete(gate, asking("b", 3))).ids == uninterrupted(asking("b", 3))
    await task
    assert reply.ids == uninterrupted(asking("a", 60)) and gate.paused is None


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.DRAIN])
async def test_memory_is_released_when_nothing_runs_and_all_goes_on_once_it_is_back(mode: PauseMode) -> None:
    engine = HoldingEngine()
    gate, request = gate_of(engine), asking("a", 40)
    reply, task = await begun(gate, request)
    await gate.admin.release_memory((), mode)
    assert engine.held == set() and gate.admin.released == {"weights", "kv_cache", "cuda_graph"}
    with pytest.raises(EngineUnavailable, match="resume_memory"):
        await gate.admin.resume()
    await gate.admin.resume_memory(["weights"])
    await gate.admin.resume_memory(["weights", "kv_cache"])
    assert gate.paused is mode and gate.admin.released == {"cuda_graph"}
    await gate.admin.resume_memory(())
    assert gate.paused is None and engine.held == {"weights", "kv_cache", "cuda_graph"}
    await task
    assert reply.ids == uninterrupted(request)


async def test_memory_is_released_only_once() -> None:
    engine = HoldingEngine()
    gate = gate_of(engine)
    for tags in (["kv_cache"], ["kv_cache"], [], ["weights"]):
        await gate.admin.release_memory(tags, PauseMode.ABORT)
    assert engine.held == set()
    await gate.admin.resume_memory(())
    await gate.admin.resume_memory(())
    assert gate.paused is None


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_what_a_pause_left_in_the_engine_is_cut_before_memory_goes(mode: PauseMode) -> None:
    engine = HoldingEngine()
    gate, request = gate_of(engine), asking("a", 40)
    reply, task = await begun(gate, request)
    await gate.admin.pause(mode)
    await gate.admin.release_memory((), PauseMode.ABORT)
    assert engine.running == [] and engine.held == set()
    await gate.admin.resume_memory(())
    assert gate.paused is not None  # it was paused before, and is to be continued by who paused it
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request)


async def test_a_release_that_is_not_possible_disturbs_nobody() -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), asking("a", 30)
    reply, task = await begun(gate, request)
    for refused in (gate.admin.release_memory((), PauseMode.ABORT), gate.admin.resume_memory(())):
        with pytest.raises(EngineUnavailable, match="scripted"):
            await refused
    await task
    assert reply.ids == uninterrupted(request) and len(engine.requests) == 1


async def test_a_release_that_fails_goes_on() -> None:
    engine = HoldingEngine()
    engine.broken = True
    gate, request = gate_of(engine), asking("a", 30)
    reply, task = await begun(gate, request)
    with pytest.raises(EngineUnavailable, match="just now"):
        await gate.admin.release_memory((), PauseMode.ABORT)
    assert gate.paused is None and not gate.admin.released
    await task
    assert reply.ids == uninterrupted(request)


async def test_closing_ends_requests_that_a_pause_had_cut_before() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    reply, task = await begun(gate, asking("a", 4000))
    await gate.admin.pause(PauseMode.ABORT)
    await gate.admin.resume()
    await until(lambda: len(engine.requests) == 2)
    await gate.engine.close()
    await task
    assert reply.finish is FinishReason.ABORT


async def test_a_gate_that_sends_away_keeps_nobody_waiting_and_cuts_nobody_off() -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine, pause_timeout_s=10_000.0), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(PauseMode.ABORT)
    waiting = asyncio.create_task(complete(gate, asking("b", 3)))
    await until(lambda: gate.waiting == 1)
    gate.send_away()
    with pytest.raises(EngineUnavailable, match="stopping"):
        await waiting
    async with asyncio.timeout(60):
        with pytest.raises(EngineUnavailable, match="stopping"):
            await gate.enter()
    assert gate.waiting == 0 and not task.done()
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request)
    await gate.enter()  # open, it lets in


async def test_a_server_that_stops_just_when_a_pause_has_lasted_too_long_sends_all_others_away() -> None:
    gate = gate_of(WatchfulEngine(), pause_timeout_s=60.0)
    await gate.admin.pause(PauseMode.IN_PLACE)
    waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
    await until(lambda: gate.waiting == 3)
    over = list(gate._arrivals)[:2]
    for timer in over:
        timer.reschedule(asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    assert all(timer.expired() for timer in over) and gate.waiting == 3  # their time is up, and none has run since
    gate.send_away()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineUnavailable] * 3 and gate.waiting == 0
