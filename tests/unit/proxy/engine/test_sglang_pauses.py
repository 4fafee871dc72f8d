"""Pauses of a simulated SGLang server: no request hangs, and no prefix of old weights stays cached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from proxy.engine.contract import CollectedReply, complete, request_for
from proxy.engine.interface import PauseMode
from proxy.engine.servers import sglang_server
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.types import ids_of
from tests.engines.gates import AdminGate
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import LiveWire
from tests.support import until
from tokengrove.errors import InvalidRequest

PROMPT = ids_of(range(40, 60))
SELDOM_S = 3600.0


@pytest.fixture(autouse=True)
def short_wait_for_late_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_server, "_LATE_S", 0.2)


@contextlib.asynccontextmanager
async def behind_gate() -> AsyncIterator[tuple[LiveWire, AdminGate]]:
    live = LiveWire()
    await live.start()
    opener = connect(VOCABULARY, None)
    pool = Pool([live.url], opener, start_timeout_s=5.0, check_s=SELDOM_S)
    await pool.start()
    try:
        yield live, AdminGate(pool)
    finally:
        await pool.close()
        await live.kill()


async def on_its_way(live: LiveWire, gate: AdminGate) -> asyncio.Task[CollectedReply]:
    """Start a request that the gate has admitted and that has not reached the server."""
    live.arriving.clear()
    task = asyncio.create_task(gate.read(request_for(PROMPT, 40)))
    await until(lambda: gate.running == 1)
    return task


async def test_memory_is_released_although_a_request_arrives_just_after_the_abort() -> None:
    async with behind_gate() as (live, gate):
        late = await on_its_way(live, gate)
        async with asyncio.timeout(30):
            await gate.admin.release_memory((), PauseMode.ABORT)
        assert gate.running == 0 and not late.done()
        live.arriving.set()
        await gate.admin.resume_memory(())
        reply = await late
        assert reply.ids == following(PROMPT, 40) and reply.finish is not None


async def test_the_prefix_cache_is_flushed_although_a_request_arrives_just_after_the_abort() -> None:
    async with behind_gate() as (live, gate):
        late = await on_its_way(live, gate)
        await gate.admin.update_weights("/weights/1", 1, PauseMode.ABORT)
        assert [path for path, _ in live.wire.calls] == ["/update_weights_from_disk", "/flush_cache"]
        live.arriving.set()
        reply = await late
        assert reply.ids == following(PROMPT, 40) and set(reply.versions) == {1}


async def test_weights_are_loaded_although_an_aborted_request_lingers_at_the_server() -> None:
    async with behind_gate() as (live, gate):
        live.wire.lingers = True
        assert await gate.admin.update_weights("/weights/1", 1, PauseMode.DRAIN) == 1
        assert [path for path, _ in live.wire.calls] == ["/update_weights_from_disk", "/flush_cache", "/flush_cache"]
        reply = await gate.read(request_for(PROMPT, 40))
        assert reply.ids == following(PROMPT, 40) and set(reply.versions) == {1}


async def test_a_refused_flush_leaves_the_server_running() -> None:
    async with behind_gate() as (live, gate):
        live.wire.flushes = False
        with pytest.raises(InvalidRequest):
            await gate.admin.flush_cache()
        assert gate.state.paused is None
        async with asyncio.timeout(30):
            assert (await gate.read(request_for(PROMPT, 40))).ids == following(PROMPT, 40)


async def test_a_server_removed_during_a_pause_is_resumed_and_can_return() -> None:
    async with behind_gate() as (live, gate):
        other = LiveWire()
        await other.start()
        try:
            assert isinstance(gate.engine, Pool)
            await gate.engine.add(other.url)
            await gate.admin.pause(PauseMode.ABORT)
            await gate.engine.remove(live.url)
            await gate.admin.resume()
            await gate.engine.add(live.url)
            await gate.engine.remove(other.url)
            async with asyncio.timeout(30):
                assert (await gate.read(request_for(PROMPT, 40))).ids == following(PROMPT, 40)
        finally:
            await other.kill()


async def test_closing_a_paused_pool_resumes_its_servers() -> None:
    live = LiveWire()
    await live.start()
    try:
        for _ in range(2):
            pool = Pool([live.url], connect(VOCABULARY, None), start_timeout_s=5.0)
            await pool.start()
            async with asyncio.timeout(30):
                assert (await complete(pool, request_for(PROMPT, 40))).ids == following(PROMPT, 40)
            await pool.pause(PauseMode.RETRACT)
            await pool.close()
    finally:
        await live.kill()
