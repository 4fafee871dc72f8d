"""Pauses, weight updates and lost servers: each request gets the same tokens as without them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from proxy.engine import gate as gates
from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.interface import AdapterSource, Capability, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.side_columns.columns import EXPERTS, ColumnRequest
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.turns.generation import sample
from proxy.types import ImageFile
from tests.engines.gates import AdminGate
from tests.support import let_pass, until
from tests.unit.proxy.engine.gated import (
    HoldingEngine,
    PooledEngine,
    RefusingEngine,
    StubbornEngine,
    WatchfulEngine,
    asking,
    gate_of,
    uninterrupted,
)
from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    UnsupportedParameter,
)
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason


class DyingInAPause(WatchfulEngine):
    """Waits for `pausing` whenever its server dies."""

    pausing: Callable[[], Awaitable[None]]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        try:
            async with aclosing(super().generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineLost:
            await self.pausing()
            raise


class Routing(WatchfulEngine):
    """Reports experts with the last chunk. A row names its submission and its position."""

    submissions = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        assert request.columns is not None
        self.submissions += 1
        start, end, number = request.columns.start, len(request.prompt), self.submissions
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                end += len(chunk.ids)
                if chunk.finish is not None:
                    rows = np.array([[[number, at]] for at in range(start, end - 1)], np.uint8).reshape(-1, 1, 2)
                    chunk = replace(chunk, columns={EXPERTS: SideColumn(start, SideRows(rows))})
                yield chunk


async def test_experts_of_a_resubmission_are_missing_for_tokens_that_a_lost_server_took_in() -> None:
    """The lost server had taken in all tokens of its output but the last."""
    for lost in (0, 1, 7):
        gate = gate_of(Routing(deaths=[lost]))
        request = replace(asking("r", 20), columns=ColumnRequest(frozenset({Replay.EXPERTS})))
        found: list[TokenChunk] = []

        def take(chunk: TokenChunk, into: list[TokenChunk] = found) -> None:
            into.append(chunk)

        await gate.sample(request, take)
        (column,) = [chunk.columns[EXPERTS] for chunk in found if chunk.columns]
        prompt, end = len(request.prompt), len(request.prompt) + 19
        missing = range(prompt, prompt + lost - 1)
        assert (column.start, column.end) == (0, end)
        assert np.flatnonzero(column.rows.missing).tolist() == list(missing)
        kept = [at for at in range(end) if at not in missing]
        assert column.rows.values[kept].tolist() == [[[2, at]] for at in kept]


async def test_experts_that_a_cut_reply_reported_are_not_asked_for_again() -> None:
    gate = gate_of(engine := Routing())
    request = replace(asking("r", 40), columns=ColumnRequest(frozenset({Replay.EXPERTS})))
    found: list[TokenChunk] = []

    def take(chunk: TokenChunk) -> None:
        found.append(chunk)

    task = asyncio.create_task(gate.sample(request, take))
    await until(lambda: sum(len(chunk.ids) for chunk in found) >= 5)
    await gate.admin.pause(PauseMode.ABORT)
    await gate.admin.resume()
    await task
    first, second = [chunk.columns[EXPERTS] for chunk in found if chunk.columns]
    assert first.start == 0 and first.end == second.start and second.end == len(request.prompt) + 39
    assert not first.rows.missing.any() and not second.rows.missing.any() and engine.submissions == 2


CUTTING = [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT]


async def _read_none(digests: Sequence[str]) -> list[ImageFile]:
    return []


async def begun(
    gate: AdminGate, request: GenerateRequest, tokens: int = 3
) -> tuple[CollectedReply, asyncio.Task[FinishReason]]:
    """Start a request and wait for its first `tokens` tokens."""
    reply = CollectedReply()
    task = asyncio.create_task(gate.sample(request, reply.add))
    await until(lambda: len(reply.ids) >= tokens or task.done())
    return reply, task


@pytest.mark.parametrize("mode", CUTTING)
async def test_a_pause_stops_sampling_and_loses_no_token(mode: PauseMode, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(mode)
    assert gate.state.paused is mode and engine.paused
    await until(lambda: gate.running == (0 if mode is PauseMode.ABORT else 1))
    stopped_at = len(reply.ids)
    await let_pass(60.0, monkeypatch)
    assert len(reply.ids) == stopped_at < 60 and reply.finish is None
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request) and reply.finish is FinishReason.LENGTH
    assert gate.state.paused is None and not engine.trespassers
    assert len(engine.requests) == (2 if mode is PauseMode.ABORT else 1)


async def test_an_aborted_request_is_resubmitted_with_its_output_and_the_rest_of_its_budget() -> None:
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


async def test_a_drain_waits_for_running_requests_and_admits_none() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    reply, task = await begun(gate, asking("a", 40))
    pausing = asyncio.create_task(gate.admin.pause(PauseMode.DRAIN))
    await until(lambda: gate.state.held)
    late = asyncio.create_task(gate.read(asking("b", 5)))
    await pausing
    assert reply.finish is FinishReason.LENGTH and len(reply.ids) == 40 and gate.waiting == 1
    assert [request.request_id for request in engine.requests] == ["a"]
    await gate.admin.resume()
    assert (await late).ids == uninterrupted(asking("b", 5))
    await task


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_update_changes_no_token_and_versions_ascend(mode: PauseMode) -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    requests = [asking(f"r{n}", 80, start=20 * n + 1) for n in range(4)]
    running = await asyncio.gather(*(begun(gate, request) for request in requests))
    assert await gate.admin.update_weights("/weights", None, mode) == 1
    await asyncio.gather(*(task for _, task in running))
    for request, (reply, _) in zip(requests, running, strict=True):
        assert reply.ids == uninterrupted(request)
        assert reply.versions == sorted(reply.versions)
        assert set(reply.versions) == ({0} if mode is PauseMode.DRAIN else {0, 1})
    assert (await gate.read(asking("after", 3))).versions == [1, 1, 1]
    assert gate.state.paused is None


async def test_an_update_during_a_pause_leaves_it_paused() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    await gate.admin.pause(PauseMode.IN_PLACE)
    assert await gate.admin.update_weights("/weights", 7, PauseMode.ABORT) == 7
    assert gate.state.paused is PauseMode.IN_PLACE and engine.paused
    await gate.admin.resume()
    assert (await gate.read(asking("a", 2))).versions == [7, 7]


async def test_no_request_is_admitted_between_updates_in_quick_succession() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    await gate.admin.pause(PauseMode.DRAIN)
    waiting = [asyncio.create_task(gate.read(asking(f"w{n}", 4))) for n in range(3)]
    await until(lambda: gate.waiting == 3)
    await gate.admin.resume()
    for _ in range(3):  # each shuts the gate again before the woken requests run
        await gate.admin.update_weights("/weights", None, PauseMode.DRAIN)
    for reply in await asyncio.gather(*waiting):
        assert reply.versions == [3] * 4
    assert engine.trespassers == []


async def test_an_interrupted_request_does_not_continue_during_the_next_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(PauseMode.ABORT)
    await until(lambda: gate.running == 0)
    await gate.admin.resume()
    await gate.admin.pause(PauseMode.DRAIN)
    await let_pass(60.0, monkeypatch)
    assert engine.trespassers == [] and gate.running == 0 and len(engine.requests) == 1
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request)


async def test_a_request_that_waits_longer_than_the_pause_timeout_is_refused() -> None:
    gate = gate_of(WatchfulEngine(), pause_timeout_s=0.05)
    await gate.admin.pause(PauseMode.IN_PLACE)
    with pytest.raises(EngineUnavailable, match="--pause-timeout-s") as refused:
        await gate.read(asking("a", 3))
    assert refused.value.retry_after_s and refused.value.status == 503
    assert gate.waiting == 0


async def test_a_request_that_arrives_during_a_pause_runs_after_it() -> None:
    gate = gate_of(WatchfulEngine(), pause_timeout_s=10_000.0)
    await gate.admin.pause(PauseMode.IN_PLACE)
    waiting = asyncio.create_task(gate.read(asking("b", 3)))
    await until(lambda: gate.waiting == 1)
    await gate.admin.resume()
    assert (await waiting).ids == uninterrupted(asking("b", 3))


@pytest.mark.parametrize("mode", CUTTING)
async def test_the_token_timeout_does_not_run_during_a_pause(mode: PauseMode, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(WatchfulEngine(), engine_timeout_s=60.0, pause_timeout_s=10_000.0)
    request = asking("a", 30)
    running = asyncio.create_task(sample(gate, request))
    await until(lambda: gate.running == 1)
    await gate.admin.pause(mode)
    late = asyncio.create_task(sample(gate, asking("b", 3)))
    await until(lambda: gate.waiting == 1)
    await let_pass(3600.0, monkeypatch)
    await gate.admin.resume()
    assert list((await running).ids) == uninterrupted(request)
    assert list((await late).ids) == uninterrupted(asking("b", 3))


async def test_a_request_given_up_just_before_a_pause_starts_no_token_timeout_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request goes on at another server; the pause began between its cancellation and that."""
    engine, others = PooledEngine(), iter([True])
    monkeypatch.setattr(engine, "has_other", lambda _: next(others, False))
    gate = gate_of(engine, engine_timeout_s=60.0, pause_timeout_s=10_000.0)
    requests = [asking("a", 30), asking("b", 30)]
    silent = asyncio.create_task(sample(gate, requests[0]))
    await until(lambda: gate.running == 1)
    running = asyncio.create_task(sample(gate, requests[1]))
    await until(lambda: gate.running == 2)
    (flight,) = (flight for flight in gate._flights if flight.task is silent)
    flight.last_token_at = -1000.0
    gate._look()
    assert silent.cancelling() == 1
    await gate.admin.pause(PauseMode.IN_PLACE)
    await let_pass(3600.0, monkeypatch)
    await gate.admin.resume()
    assert list((await running).ids) == uninterrupted(requests[1])
    assert list((await silent).ids) == uninterrupted(requests[0])


async def test_a_drain_ends_a_request_that_gives_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(WatchfulEngine(tick_s=7200.0), engine_timeout_s=60.0, pause_timeout_s=10_000.0)
    hung = asyncio.create_task(sample(gate, asking("a", 3)))
    await until(lambda: gate.running == 1)
    draining = asyncio.create_task(gate.admin.pause(PauseMode.DRAIN))
    await until(lambda: gate.state.held)
    await let_pass(61.0, monkeypatch)
    with pytest.raises(EngineTimeout):
        await hung
    await draining
    assert gate.state.paused is PauseMode.DRAIN


async def test_the_token_timeout_runs_again_after_a_pause() -> None:
    gate = gate_of(WatchfulEngine(tick_s=60.0), engine_timeout_s=0.05)
    running = asyncio.create_task(sample(gate, asking("a", 3)))
    await until(lambda: gate.running == 1)
    await gate.admin.pause(PauseMode.IN_PLACE)
    await gate.admin.resume()
    with pytest.raises(EngineTimeout):
        await running


async def test_the_token_timeout_runs_for_a_request_that_arrived_during_a_pause() -> None:
    gate = gate_of(WatchfulEngine(tick_s=3600.0), engine_timeout_s=0.05, pause_timeout_s=10_000.0)
    await gate.admin.pause(PauseMode.IN_PLACE)
    waiting = asyncio.create_task(sample(gate, asking("a", 3)))
    await until(lambda: gate.waiting == 1)
    await gate.admin.resume()
    async with asyncio.timeout(30):
        with pytest.raises(EngineTimeout):
            await waiting


async def test_an_abort_waits_for_constrained_outputs_and_interrupts_the_others() -> None:
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
async def test_lost_servers_lose_and_repeat_no_token(deaths: list[int]) -> None:
    engine = WatchfulEngine(deaths=deaths)
    gate, request = gate_of(engine), asking("a", 30)
    reply = await gate.read(request)
    assert reply.ids == uninterrupted(request) and reply.finish is FinishReason.LENGTH
    assert gate.running == 0
    # No request is sent once all tokens are there, even if the finish reason was lost.
    assert len(engine.requests) == sum(bool(death) for death in deaths) + (sum(deaths) < 30)


async def test_a_request_fails_after_too_many_lost_servers() -> None:
    with pytest.raises(EngineLost):
        await gate_of(WatchfulEngine(deaths=[1] * 20)).read(asking("a", 30))


async def test_a_constrained_output_is_resubmitted_only_before_its_first_token() -> None:
    whole = await gate_of(WatchfulEngine(deaths=[0, 0])).read(asking("a", 9, constrained=True))
    assert whole.ids == uninterrupted(asking("a", 9))
    with pytest.raises(EngineLost):
        await gate_of(WatchfulEngine(deaths=[2])).read(asking("a", 9, constrained=True))


async def test_a_request_whose_server_dies_during_a_pause_continues_after_it() -> None:
    engine = DyingInAPause(deaths=[5])
    gate, request = gate_of(engine), asking("a", 30)
    engine.pausing = lambda: gate.admin.pause(PauseMode.IN_PLACE)
    reading = asyncio.create_task(gate.read(request))
    await until(lambda: gate.state.paused is not None and gate.running == 0)
    await gate.admin.resume()
    assert (await reading).ids == uninterrupted(request) and engine.trespassers == []


async def test_cached_tokens_count_the_prompt_alone() -> None:
    gate, request = gate_of(WatchfulEngine(deaths=[10])), asking("a", 30)
    assert (await sample(gate, request)).cached_tokens == len(request.input_ids)


async def test_all_requests_continue_after_a_pause_that_fails() -> None:
    engine = RefusingEngine()
    gate, request = gate_of(engine), asking("a", 30)
    reply, task = await begun(gate, request)
    for mode in CUTTING:
        with pytest.raises(EngineUnavailable, match="cannot pause"):
            await gate.admin.pause(mode)
        assert gate.state.paused is None and not engine.paused
    await task
    assert reply.ids == uninterrupted(request)
    assert (await gate.read(asking("b", 3))).ids == uninterrupted(asking("b", 3))


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_all_requests_continue_with_the_old_weights_after_an_update_that_fails(mode: PauseMode) -> None:
    engine = StubbornEngine()
    gate, request = gate_of(engine), asking("a", 40)
    reply, task = await begun(gate, request)
    with pytest.raises(InvalidRequest) as refused:
        await gate.admin.update_weights("/nothing", None, mode)
    assert refused.value.param == "path"
    await task
    assert reply.ids == uninterrupted(request) and set(reply.versions) == {0}
    assert gate.state.paused is None and not engine.paused


async def test_a_pause_during_a_pause_and_a_resume_without_one_change_nothing() -> None:
    gate = gate_of(WatchfulEngine())
    await gate.admin.resume()
    await gate.admin.pause(PauseMode.RETRACT)
    await gate.admin.pause(PauseMode.ABORT)
    assert gate.state.paused is PauseMode.RETRACT
    await gate.admin.resume()
    assert (await gate.read(asking("a", 3))).ids == uninterrupted(asking("a", 3))


async def test_cancelled_sampling_frees_the_engine_before_it_returns() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    _, task = await begun(gate, asking("a", 500))
    assert engine.running == ["a"] and gate.running == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.running == [] and gate.running == 0


async def test_a_reason_of_the_taker_ends_sampling_and_frees_the_engine_before_it_returns() -> None:
    engine = WatchfulEngine()
    gate, reply = gate_of(engine), CollectedReply()

    def take(chunk: TokenChunk) -> FinishReason | None:
        reply.add(chunk)
        return FinishReason.STOP_STRING if len(reply.ids) == 3 else None

    assert await gate.sample(asking("a", 500), take) is FinishReason.STOP_STRING
    assert reply.ids == uninterrupted(asking("a", 3)) and engine.running == [] and gate.running == 0


async def test_an_error_of_the_taker_is_raised_and_frees_the_engine() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)

    def take(chunk: TokenChunk) -> FinishReason | None:
        raise EngineFailed("this chunk is inconsistent")

    with pytest.raises(EngineFailed, match="inconsistent"):
        await gate.sample(asking("a", 500), take)
    assert engine.running == [] and gate.running == 0


async def test_each_token_renews_the_patience_for_the_next() -> None:
    gate, request = gate_of(WatchfulEngine(tick_s=0.02), engine_timeout_s=1.0), asking("a", 75)
    assert (await gate.read(request)).ids == uninterrupted(request)  # takes longer than the timeout


async def test_silent_requests_expire_each_by_itself_and_leave_the_others_and_their_tasks_alone() -> None:
    class PartlySilentEngine(WatchfulEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            if request.request_id.startswith("silent"):
                await asyncio.Event().wait()
            async with aclosing(super().generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def asks_again(gate: AdminGate, name: str) -> int:
        with pytest.raises(EngineTimeout):
            await gate.read(asking(f"silent {name}", 3))
        assert (await gate.read(asking(name, 3))).ids == uninterrupted(asking(name, 3))
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    gate, request = gate_of(PartlySilentEngine(tick_s=0.02), engine_timeout_s=1.0), asking("a", 75)
    going = asyncio.create_task(gate.read(request))
    async with asyncio.timeout(30):
        assert await asyncio.gather(*(asks_again(gate, name) for name in "bcd")) == [0, 0, 0]
    assert (await going).ids == uninterrupted(request) and gate.running == 0


async def test_a_task_that_is_cancelled_as_its_request_expires_stays_cancelled() -> None:
    class SlowlyFreedEngine(WatchfulEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            try:
                async with aclosing(super().generate(request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                freeing.set()
                await asyncio.Event().wait()

    freeing = asyncio.Event()
    gate = gate_of(SlowlyFreedEngine(tick_s=3600.0), engine_timeout_s=0.5)
    task = asyncio.create_task(gate.read(asking("a", 3)))
    await freeing.wait()
    assert task.cancelling() == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("mode", CUTTING)
async def test_a_request_cancelled_during_a_pause_is_not_resubmitted(mode: PauseMode) -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    _, running = await begun(gate, asking("a", 500))
    await gate.admin.pause(mode)
    late = asyncio.create_task(gate.read(asking("b", 500)))
    await until(lambda: gate.waiting == 1)
    for task in (running, late):
        task.cancel()
    await asyncio.gather(running, late, return_exceptions=True)
    assert (gate.waiting, gate.running, engine.running) == (0, 0, [])
    await gate.admin.resume()
    assert [request.request_id for request in engine.requests] == ["a"]
    assert (await gate.read(asking("c", 3))).ids == uninterrupted(asking("c", 3))


async def test_a_cancelled_drain_admits_requests_again() -> None:
    gate = gate_of(WatchfulEngine())
    reply, task = await begun(gate, asking("a", 60))
    draining = asyncio.create_task(gate.admin.pause(PauseMode.DRAIN))
    await until(lambda: gate.state.held)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    assert (await gate.read(asking("b", 3))).ids == uninterrupted(asking("b", 3))
    await task
    assert reply.ids == uninterrupted(asking("a", 60)) and gate.state.paused is None


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.DRAIN])
async def test_requests_continue_once_all_released_memory_is_back(mode: PauseMode) -> None:
    engine = HoldingEngine()
    gate, request = gate_of(engine), asking("a", 40)
    reply, task = await begun(gate, request)
    await gate.admin.release_memory((), mode)
    assert engine.held == set() and gate.state.released == {"weights", "kv_cache", "cuda_graph"}
    with pytest.raises(EngineUnavailable, match="resume_memory"):
        await gate.admin.resume()
    await gate.admin.resume_memory(["weights"])
    await gate.admin.resume_memory(["weights", "kv_cache"])
    assert gate.state.paused is mode and gate.state.released == {"cuda_graph"}
    await gate.admin.resume_memory(())
    assert gate.state.paused is None and engine.held == {"weights", "kv_cache", "cuda_graph"}
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
    assert gate.state.paused is None


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_requests_paused_in_the_engine_are_aborted_before_memory_is_released(mode: PauseMode) -> None:
    engine = HoldingEngine()
    gate, request = gate_of(engine), asking("a", 40)
    reply, task = await begun(gate, request)
    await gate.admin.pause(mode)
    await gate.admin.release_memory((), PauseMode.ABORT)
    assert engine.running == [] and engine.held == set()
    await gate.admin.resume_memory(())
    assert gate.state.paused is not None  # the earlier pause stays in force
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request)


async def test_a_pause_outlasts_a_release_of_memory_even_after_an_earlier_release() -> None:
    gate = gate_of(HoldingEngine())
    await gate.admin.release_memory((), PauseMode.ABORT)
    await gate.admin.resume_memory(())
    await gate.admin.pause(PauseMode.DRAIN)
    await gate.admin.release_memory((), PauseMode.ABORT)
    await gate.admin.resume_memory(())
    assert gate.state.paused is PauseMode.DRAIN


async def test_a_release_that_the_engine_cannot_do_disturbs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchfulEngine()
    lacking = replace(engine.info(), capabilities=frozenset(Capability) - {Capability.RELEASE_MEMORY})
    monkeypatch.setattr(engine, "info", lambda: lacking)
    gate, request = gate_of(engine), asking("a", 30)
    reply, task = await begun(gate, request)
    for refused in (gate.admin.release_memory((), PauseMode.ABORT), gate.admin.resume_memory(())):
        with pytest.raises(EngineUnavailable, match="scripted"):
            await refused
    await task
    assert reply.ids == uninterrupted(request) and len(engine.requests) == 1


async def test_images_never_reach_an_engine_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine), replace(asking("a", 3), images=PromptImages((), ImagePool(_read_none, 0), {}))
    await gate.sample(request, CollectedReply().add)
    lacking = replace(engine.info(), capabilities=frozenset(Capability) - {Capability.IMAGES})
    monkeypatch.setattr(gate, "info", lambda: lacking)
    with pytest.raises(UnsupportedParameter, match="'scripted' does not take images") as refused:
        await gate.sample(request, CollectedReply().add)
    assert refused.value.status == 400 and refused.value.param == "messages" and len(engine.requests) == 1


async def test_an_adapter_never_reaches_an_engine_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchfulEngine()
    lacking = replace(engine.info(), capabilities=frozenset(Capability) - {Capability.ADAPTERS})
    monkeypatch.setattr(engine, "info", lambda: lacking)
    gate = gate_of(engine)
    with pytest.raises(EngineIncapable, match="'scripted' cannot sample with the adapter of version 7"):
        await gate.sample(replace(asking("a", 3), adapter=7), CollectedReply().add)
    await gate.sample(asking("b", 3), CollectedReply().add)
    assert [request.request_id for request in engine.requests] == ["b"]


async def test_an_adapter_never_reaches_an_engine_that_only_says_that_it_has_adapters() -> None:
    class Boastful:
        """An engine of someone else, which does not know adapters."""

        def __init__(self, engine: WatchfulEngine) -> None:
            self.info, self.generate = engine.info, engine.generate

    engine = WatchfulEngine()
    gate = AdminGate(Boastful(engine))  # type: ignore[arg-type]
    with pytest.raises(EngineIncapable, match="it serves no adapters"):
        await gate.sample(replace(asking("a", 3), adapter=7), CollectedReply().add)
    assert not engine.requests


async def test_a_rest_without_tokens_ends_with_the_version_of_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last server dies after the last token, so the gate ends the reply."""
    engine = WatchfulEngine(deaths=[3])
    monkeypatch.setattr(engine, "adapters", {7: AdapterSource("/adapter")}, raising=False)
    for name in ("load_adapter", "unload_adapter"):
        monkeypatch.setattr(engine, name, lambda: None, raising=False)
    able = replace(engine.info(), capabilities=frozenset(Capability))
    monkeypatch.setattr(engine, "info", lambda: able)
    chunks: list[TokenChunk] = []
    await gate_of(engine).sample(replace(asking("a", 3), adapter=7), chunks.append)
    assert chunks[-1].finish is FinishReason.LENGTH and chunks[-1].version == 7 and not chunks[-1].ids


async def test_a_release_that_fails_ends_its_pause() -> None:
    engine = HoldingEngine()
    engine.broken = True
    gate, request = gate_of(engine), asking("a", 30)
    reply, task = await begun(gate, request)
    with pytest.raises(EngineUnavailable, match="just now"):
        await gate.admin.release_memory((), PauseMode.ABORT)
    assert gate.state.paused is None and not gate.state.released
    await task
    assert reply.ids == uninterrupted(request)


async def test_a_release_that_fails_leaves_an_earlier_pause_in_force() -> None:
    engine = HoldingEngine()
    gate, engine.broken = gate_of(engine), True
    await gate.admin.pause(PauseMode.DRAIN)
    with pytest.raises(EngineUnavailable):
        await gate.admin.release_memory((), PauseMode.ABORT)
    assert gate.state.paused is PauseMode.DRAIN


async def test_closing_ends_requests_that_a_pause_interrupted_before() -> None:
    engine = WatchfulEngine()
    gate = gate_of(engine)
    reply, task = await begun(gate, asking("a", 4000))
    await gate.admin.pause(PauseMode.ABORT)
    await gate.admin.resume()
    await until(lambda: len(engine.requests) == 2)
    await gate.engine.close()
    await task
    assert reply.finish is FinishReason.ABORT


async def test_on_shutdown_waiting_requests_are_refused_and_admitted_ones_continue() -> None:
    engine = WatchfulEngine()
    gate, request = gate_of(engine, pause_timeout_s=10_000.0), asking("a", 60)
    reply, task = await begun(gate, request)
    await gate.admin.pause(PauseMode.ABORT)
    waiting = asyncio.create_task(gate.read(asking("b", 3)))
    await until(lambda: gate.waiting == 1)
    gate.send_away()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await waiting
    async with asyncio.timeout(60):
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await gate.enter()
    assert gate.waiting == 0 and not task.done()
    await gate.admin.resume()
    await task
    assert reply.ids == uninterrupted(request)
    await gate.enter()  # an open gate admits requests


async def test_a_shutdown_just_as_the_pause_timeout_expires_refuses_all_waiting_requests() -> None:
    gate = gate_of(WatchfulEngine(), pause_timeout_s=60.0)
    await gate.admin.pause(PauseMode.IN_PLACE)
    waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
    await until(lambda: gate.waiting == 3)
    over = list(gate._arrivals)[:2]
    for timer in over:
        timer.reschedule(asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    assert all(timer.expired() for timer in over) and gate.waiting == 3  # expired, but not run yet
    gate.send_away()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineUnavailable] * 3 and gate.waiting == 0


async def test_the_token_timeout_does_not_run_without_a_server_and_runs_again_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PooledEngine()
    gate = gate_of(engine, engine_timeout_s=60.0, pause_timeout_s=10_000.0)
    _, task = await begun(gate, asking("a", 60))
    engine.fall()
    await until(lambda: gate.waiting == 1)
    await let_pass(3600.0, monkeypatch)
    assert not task.done() and gate.running == 0
    silent = asyncio.Event()
    monkeypatch.setattr(engine, "_wait", lambda *_: silent.wait())
    engine.rise()
    await until(lambda: gate.running == 1)
    await let_pass(61.0, monkeypatch)
    with pytest.raises(EngineTimeout):
        await task


async def test_the_time_of_a_pause_does_not_count_as_a_wait_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PooledEngine()
    gate, request = gate_of(engine, engine_timeout_s=50.0, pause_timeout_s=60.0), asking("a", 60)
    reply, task = await begun(gate, request)
    engine.fall()
    await until(lambda: gate.waiting == 1)
    await gate.admin.pause(PauseMode.ABORT)
    await let_pass(61.0, monkeypatch)
    await gate.admin.resume()
    await until(lambda: gate.waiting == 1)
    await let_pass(59.0, monkeypatch)
    assert not task.done()
    engine.rise()
    await task
    assert reply.ids == uninterrupted(request)
    engine.fall()
    late = asyncio.create_task(gate.read(asking("b", 3)))
    await until(lambda: gate.waiting == 1)
    await let_pass(61.0, monkeypatch)
    with pytest.raises(EngineUnavailable, match="no engine server has been alive"):
        await late


async def test_without_a_server_a_begun_output_under_a_grammar_fails_and_another_waits() -> None:
    engine = PooledEngine()
    gate = gate_of(engine)
    _, task = await begun(gate, asking("begun", 60, constrained=True))
    engine.fall()
    waiting = asyncio.create_task(gate.read(asking("waiting", 9, constrained=True)))
    with pytest.raises(EngineLost):
        await task
    engine.rise()
    assert (await waiting).ids == uninterrupted(asking("waiting", 9))


async def test_from_its_second_lost_server_on_a_request_waits_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "_WAIT_S", 100.0)
    engine = WatchfulEngine(deaths=[1, 1, 1])
    gate, request = gate_of(engine), asking("a", 9)
    reading = asyncio.create_task(gate.read(request))
    for submissions, wait_s in ((2, 100.0), (3, 200.0)):
        await until(lambda: len(engine.requests) == submissions and gate.running == 0)  # noqa: B023
        await let_pass(wait_s - 1.0, monkeypatch)
        assert len(engine.requests) == submissions
        await let_pass(1.0, monkeypatch)
    assert (await reading).ids == uninterrupted(request) and len(engine.requests) == 4


async def test_a_shutdown_refuses_requests_that_wait_for_a_server() -> None:
    engine = PooledEngine()
    gate = gate_of(engine, pause_timeout_s=10_000.0)
    _, task = await begun(gate, asking("a", 60))
    engine.fall()
    late = asyncio.create_task(gate.read(asking("b", 60)))
    await until(lambda: gate.waiting == 2)
    gate.send_away()
    for refused in (task, late):
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await refused
    assert gate.waiting == gate.running == 0
