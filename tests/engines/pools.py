"""Pools over simulated engine servers on this event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import replace

import pytest

from proxy.engine.contract import request_for
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.connection import NO_KEYS, Keys
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.remote import RemoteEngine
from proxy.types import Message, PauseNote, Role, SamplingParams, TurnRequest, ids_of
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import LiveWire
from tokengrove.errors import StoreUnavailable

PROMPT = ids_of(range(40, 60))
OVER_BOTH = pytest.mark.parametrize("kind", ["sglang", "vllm"])
"""Over both kinds of engine servers."""

CHECK_S = 0.02
SELDOM_S = 3600.0


def opener_of(keys: Keys = NO_KEYS) -> Callable[[str], Awaitable[RemoteEngine]]:
    return connect(VOCABULARY, None, keys=keys)


@contextlib.asynccontextmanager
async def pool_of(*urls: str, check_s: float = CHECK_S, keys: Keys = NO_KEYS) -> AsyncIterator[Pool]:
    pool = Pool(urls, opener_of(keys), start_timeout_s=5.0, check_s=check_s)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def wires(
    count: int, *more: LiveWire, delay_s: float = 0.0, kind: str = "sglang"
) -> AsyncIterator[list[LiveWire]]:
    started = [*(LiveWire(kind, delay_s=delay_s) for _ in range(count)), *more]
    for wire in started:
        await wire.start()
    try:
        yield started
    finally:
        for wire in started:
            await wire.kill()


class Notes:
    """Notes of pauses in memory. `shared`: other servers have notes here, too. `down`: it refuses everything."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared, self.down, self.notes = shared, False, dict[tuple[str, str], PauseNote]()

    async def note(self, notes: Collection[PauseNote]) -> None:
        self._check()
        self.notes |= {(note.url, note.owner): note for note in notes}

    async def forget(self, notes: Collection[PauseNote]) -> None:
        self._check()
        for note in notes:
            known = self.notes.get((note.url, note.owner))
            if known is not None and known.until <= note.until:
                del self.notes[note.url, note.owner]

    async def noted(self) -> list[PauseNote]:
        self._check()
        return list(self.notes.values())

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("the database is down")


def of_session(session_id: str, prompt=PROMPT, tokens: int = 40, *, stream: bool = True) -> GenerateRequest:
    turn = None
    if not stream:
        turn = TurnRequest(api="chat", model="m", messages=(Message(Role.USER, "hi"),), sampling=SamplingParams())
    return replace(request_for(prompt, tokens), session_id=session_id, turn=turn)


def states(pool: Pool) -> dict[str, str]:
    return {shown["url"]: shown["state"] for shown in pool.servers()}
