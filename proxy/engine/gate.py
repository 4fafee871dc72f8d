"""Between turns and the engine: lets requests in, holds them while the engine is paused, and sends on what was cut.

What a pause or the death of a server cuts short is submitted again, with its prompt, the tokens so far and the rest of
its budget: nobody downstream notices, no token is lost, and each keeps the version that sampled it. A constrained
output cannot be taken up in its middle, so a pause that would cut it waits for it to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import Engine, EngineInfo, PauseMode
from proxy.engine.requests import GenerateRequest, rest_of
from proxy.errors import EngineLost, EngineUnavailable, ProxyError
from proxy.settings import Settings
from proxy.types import FinishReason, Ids, Logprobs, ids_of

_RETRY_AFTER_S = 5.0
_MOST_LOSSES = 5
"""How many servers may die under one request before it is given up."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A request that was let in. `cut`: a pause ends it in the engine, and it is to go on afterwards."""

    request: GenerateRequest
    timer: asyncio.Timeout | None
    limit_s: float
    output: Ids = field(default_factory=ids_of)
    running: bool = False
    cut: bool = False

    @property
    def continuable(self) -> bool:
        return self.request.grammar is None

    @property
    def left(self) -> int:
        return (self.request.sampling.max_tokens or 0) - len(self.output)

    def suspend(self, deadline: float | None) -> None:
        """Move the end of its patience; None: no end."""
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(deadline)


class Gate:
    """One engine, and everything that is asked of it."""

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
        """What runs behind the gate."""
        return self._engine.info()

    @property
    def paused(self) -> PauseMode | None:
        """How the engine is paused; None while it runs."""
        return self._mode

    @property
    def running(self) -> int:
        """How many requests the engine is at."""
        return sum(flight.running for flight in self._flights)

    def deadline(self, limit_s: float) -> float | None:
        """Until when a request may wait for its next token (the loop's time): a pause is not the engine's silence."""
        return None if self._mode is not None else asyncio.get_running_loop().time() + limit_s

    @property
    def closed(self) -> bool:
        """Whether requests have to wait before they are let in."""
        return not self._open.is_set()

    def send_away(self) -> None:
        """The server is ending: whoever waits before a closed gate, now or later, gets EngineUnavailable at once."""
        self._stopping = True
        for timer in self._arrivals:
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())

    async def enter(self) -> None:
        """Wait until requests are let in. Raises EngineUnavailable after `--pause-timeout-s`."""
        if self._open.is_set():
            return
        limit_s = self._settings.pause_timeout_s
        self.waiting += 1
        try:
            async with asyncio.timeout(0 if self._stopping else limit_s) as timer:
                self._arrivals.add(timer)
                await self._wait_open()
        except TimeoutError:
            paused = f"generation has been paused for more than {limit_s:g} s (--pause-timeout-s)"
            why = "the server is stopping" if self._stopping else paused
            raise EngineUnavailable(f"{why}; try again", retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self._arrivals.discard(timer)
            self.waiting -= 1

    async def generate(
        self, request: GenerateRequest, timer: asyncio.Timeout | None = None
    ) -> AsyncIterator[TokenChunk]:
        """Sample a continuation, whatever happens to the engine meanwhile. `timer` stands still during a pause.

        Raises what the engine raises; EngineLost only when one server after the other dies, or one in the middle of a
        constrained output.
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
        """Let no request in and pause the engine by `mode`; no effect if it is paused already.

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
        """Resume the engine and let requests in; no effect unless it is paused. Not serialised, like `shut`."""
        if self._mode is None:
            return
        await self._engine.resume()
        self._let_in()

    async def until_idle(self) -> None:
        """Wait until the engine runs no request. Only for a gate that is shut: else nothing reports the end."""
        await self._until(lambda: not self.running)

    async def _wait_open(self) -> None:
        """Wait until the gate is open. A pause may close it again before who waits comes to run."""
        while not self._open.is_set():
            await self._open.wait()

    async def _stand_by(self, flight: _Flight) -> None:
        """Wait to be submitted again; its patience stands still meanwhile."""
        if not self._open.is_set():
            flight.suspend(None)
            await self._wait_open()
            flight.suspend(self.deadline(flight.limit_s))

    async def _run(self, flight: _Flight) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of one submission. Ends without a finish when a pause cut it."""
        flight.running, flight.cut = True, False
        again = bool(flight.output)
        chunks = cast("Any", self._engine.generate(rest_of(flight.request, flight.output)))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    flight.output += chunk.ids
                    if again and chunk.cached_tokens is not None:  # the first submission's tell of the prompt alone
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
