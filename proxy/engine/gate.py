"""The gate between turns and the engine: admits requests, holds them during a pause, and resumes interrupted ones.

A request that a pause or a dead server interrupts is submitted again with its prompt, the tokens sampled so far and the
rest of its token budget. Readers see one uninterrupted stream: no token is lost or repeated, and each token keeps the
weight version that sampled it. An output under a grammar cannot be continued from its middle, so a pause of mode ABORT
waits until such outputs end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import Engine, EngineInfo, PauseMode
from proxy.engine.requests import GenerateRequest, rest_of
from proxy.errors import SHUTTING_DOWN, EngineLost, EngineUnavailable, ProxyError
from proxy.settings import Settings
from proxy.types import FinishReason, Ids, Logprobs, ids_of

_RETRY_AFTER_S = 5.0
_MOST_LOSSES = 5
"""Lost servers after which a request fails with EngineLost instead of being submitted again."""


@dataclass(slots=True, eq=False)
class _Flight:
    """An admitted request and its output so far.

    `timer`: the reader's timeout for the next token, rescheduled around pauses. `limit_s`: that timeout in seconds.
    `running`: submitted to the engine. `cut`: a pause aborted it in the engine; it is submitted again afterwards.
    """

    request: GenerateRequest
    timer: asyncio.Timeout | None
    limit_s: float
    output: Ids = field(default_factory=ids_of)
    running: bool = False
    cut: bool = False

    @property
    def continuable(self) -> bool:
        """True if the rest can be sampled in a new submission: not under a grammar."""
        return self.request.grammar is None

    @property
    def left(self) -> int:
        """Tokens of the budget (`max_tokens`) that are not sampled yet."""
        return (self.request.sampling.max_tokens or 0) - len(self.output)

    def suspend(self, deadline: float | None) -> None:
        """Set the time at which the reader's timeout expires; None: never."""
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(deadline)


class Gate:
    """The only path of requests to the engine. `EngineAdmin` shuts and reopens it.

    `waiting`: the number of requests that wait to be admitted.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self.waiting = 0
        self._settings = settings
        self._flights: set[_Flight] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._ended = asyncio.Condition()
        self._arrivals: set[asyncio.Timeout] = set()
        self._stopping = False
        self._mode: PauseMode | None = None

    def info(self) -> EngineInfo:
        """Facts about the engine behind the gate."""
        return self._engine.info()

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause in force; None while the engine runs."""
        return self._mode

    @property
    def running(self) -> int:
        """The number of requests in the engine."""
        return sum(flight.running for flight in self._flights)

    def deadline(self, limit_s: float) -> float | None:
        """Time (of the event loop) until which a request may wait for its next token; None during a pause.

        The token timeout measures a silent engine, so it does not run while the engine is paused.
        """
        return None if self._mode is not None else asyncio.get_running_loop().time() + limit_s

    @property
    def closed(self) -> bool:
        """True while new requests must wait to be admitted."""
        return not self._open.is_set()

    def send_away(self) -> None:
        """Server shutdown: requests that wait to be admitted, now or later, raise EngineUnavailable at once."""
        self._stopping = True
        for timer in self._arrivals:
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())

    async def enter(self) -> None:
        """Wait until requests are admitted. Raises EngineUnavailable after `--pause-timeout-s` or on shutdown."""
        if self._open.is_set():
            return
        limit_s = self._settings.pause_timeout_s
        self.waiting += 1
        try:
            async with asyncio.timeout(0 if self._stopping else limit_s) as timer:
                self._arrivals.add(timer)
                await self._wait_open()
        except TimeoutError:
            paused = f"generation has been paused for more than {limit_s:g} s (--pause-timeout-s); try again"
            why = SHUTTING_DOWN if self._stopping else paused
            raise EngineUnavailable(why, retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self._arrivals.discard(timer)
            self.waiting -= 1

    async def generate(
        self, request: GenerateRequest, timer: asyncio.Timeout | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample a continuation, across pauses and lost servers. `timer` does not run during a pause.

        Raises what the engine raises; EngineLost only after more than five lost servers, or if a server is lost in the
        middle of an output under a grammar.
        """
        flight = _Flight(request, timer, self._settings.engine_timeout_s)
        if not self._open.is_set():
            flight.suspend(None)
            await self.enter()
            flight.suspend(self.deadline(flight.limit_s))
        self._flights.add(flight)
        losses = 0
        try:
            while True:
                try:
                    async with aclosing(self._run(flight)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                            if chunk.finish is not None:
                                return
                    if not flight.cut:
                        return
                except EngineLost:
                    losses += 1
                    if losses > _MOST_LOSSES or (flight.output and not flight.continuable):
                        raise
                if flight.left <= 0:
                    yield TokenChunk(ids_of(), Logprobs("f"), self.info().weight_version, FinishReason.LENGTH)
                    return
                await self._stand_by(flight)
        finally:
            self._flights.discard(flight)
            await self._tell()

    async def shut(self, mode: PauseMode) -> None:
        """Admit no request and pause the engine by `mode`; no effect if it is paused already.

        Not serialised: call it through `EngineAdmin`. Raises what the engine raises; the gate is then open again.
        """
        if self._mode is not None:
            return
        self._open.clear()
        try:
            if mode is PauseMode.DRAIN:
                await self.until_idle()
            elif mode is PauseMode.ABORT:
                await self._until(lambda: not any(f.running and not f.continuable for f in self._flights))
            self._mode = mode
            for flight in self._flights:
                flight.cut = flight.cut or (mode is PauseMode.ABORT and flight.running)
                flight.suspend(None)
            await self._engine.pause(PauseMode.IN_PLACE if mode is PauseMode.DRAIN else mode)
        except BaseException as error:
            if self._mode is not None and isinstance(error, ProxyError):
                with suppress(ProxyError):  # the engine may have paused before it failed
                    await self._engine.resume()
            self._let_in()
            raise

    async def reopen(self) -> None:
        """Resume the engine and admit requests; no effect unless it is paused. Not serialised, like `shut`."""
        if self._mode is None:
            return
        await self._engine.resume()
        self._let_in()

    async def until_idle(self) -> None:
        """Wait until the engine runs no request. The gate must be shut: an open gate reports no ends."""
        await self._until(lambda: not self.running)

    async def _wait_open(self) -> None:
        """Wait until the gate is open. Loop: a new pause may shut it before the waiting task runs."""
        while not self._open.is_set():
            await self._open.wait()

    async def _stand_by(self, flight: _Flight) -> None:
        """Wait until the request can be submitted again; its timer does not run meanwhile."""
        if not self._open.is_set():
            flight.suspend(None)
            await self._wait_open()
            flight.suspend(self.deadline(flight.limit_s))

    async def _run(self, flight: _Flight) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one submission to the engine. Ends without a `finish` if a pause interrupted it."""
        flight.running, flight.cut = True, False
        again = bool(flight.output)
        chunks = cast("Any", self._engine.generate(rest_of(flight.request, flight.output)))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    flight.output += chunk.ids
                    if again and chunk.cached_tokens is not None:  # only the first submission counts the prompt alone
                        chunk = replace(chunk, cached_tokens=None)
                    if chunk.finish is FinishReason.ABORT and flight.cut:
                        if chunk.ids or chunk.corrected:
                            yield replace(chunk, finish=None)
                        return
                    yield chunk
        finally:
            flight.running = False
            await self._tell()

    def _let_in(self) -> None:
        self._mode = None
        now = asyncio.get_running_loop().time()
        for flight in self._flights:
            flight.suspend(now + flight.limit_s)
        self._open.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._ended:
            await self._ended.wait_for(condition)

    async def _tell(self) -> None:
        if not self._open.is_set():
            async with self._ended:
                self._ended.notify_all()
