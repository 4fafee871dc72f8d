"""Pauses of an SGLang server, on its wire: whatever happens meanwhile, nothing hangs and no old prefix stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.gate import Gate
from proxy.engine.pool import Pool
from proxy.engine.servers import connect
from proxy.errors import InvalidRequest
from proxy.settings import Settings
from proxy.types import ids_of
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import LiveWire

PROMPT = ids_of(range(40, 60))
SELDOM_S = 3600.0


@contextlib.asynccontextmanager
async def behind_gate() -> AsyncIterator[tuple[LiveWire, Gate]]:
    live = LiveWire()
    await live.start()
    opener = connect(VOCABULARY, None, processed_logprobs=False)
    pool = Pool([live.url], opener, start_timeout_s=5.0, check_s=SELDOM_S)
    await pool.start()
    try:
        yield live, Gate(pool, Settings())
    finally:
        await pool.close()
        await live.kill()


async def test_a_flush_that_the_server_refuses_leaves_it_running() -> None:
    async with behind_gate() as (live, gate):
        live.wire.flushes = False
        with pytest.raises(InvalidRequest):
            await gate.flush_cache()
        assert gate.paused is None
        async with asyncio.timeout(30):
            assert (await complete(gate, request_for(PROMPT, 40))).ids == following(PROMPT, 40)
