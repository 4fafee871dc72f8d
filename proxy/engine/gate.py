"""Between turns and the engine: lets requests in, holds them while the engine is paused, and sends on what was cut.

What a pause or the death of a server cuts short is submitted again, with its prompt, the tokens so far and the rest of
its budget: nobody downstream notices, no token is lost, and each keeps the version that sampled it. A constrained
output cannot be taken up in its middle, so a pause waits for those to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from proxy.engine.base import Engine, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import rest_of
from proxy.errors import EngineLost, EngineUnavailable
from proxy.settings import Settings
from proxy.types import FinishReason, GenerateRequest, Ids, Logprobs, TokenChunk, ids_of

_RETRY_AFTER_S = 5.0
_MOST_LOSSES = 5
"""How many servers may die under one request before it is given up."""

_ALL_MEMORY = "all"


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
        self.engine = engine
        self.waiting = 0
        self._settings = settings
        self._flights: set[_Flight] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._ended = asyncio.Condition()
        self._control = asyncio.Lock()
        self._mode: PauseMode | None = None
        self._released: set[str] = set()

    def info(self) -> EngineInfo:
        """What runs behind the gate."""
        return self.engine.info()

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

    async def enter(self) -> None:
        """Wait until requests are let in. Raises EngineUnavailable after `--pause-timeout-s`."""
        if self._open.is_set():
            return
        limit_s = self._settings.pause_timeout_s
        self.waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._open.wait()
        except TimeoutError:
            raise EngineUnavailable(
                f"generation has been paused for more than {limit_s:g} s (--pause-timeout-s); try again",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        finally:
            self.waiting -= 1

    async def generate(
        self, request: GenerateRequest, timer: asyncio.Timeout | None = None
    ) -> AsyncIterator[TokenChunk]:
        """Sample a continuation, whatever happens to the engine meanwhile. `timer` stands still during a pause.

        Raises what the engine raises; EngineLost only when one server after the other dies, or one in the middle of a
        constrained output.
        """
        await self.enter()
        flight = _Flight(request, timer, self._settings.engine_timeout_s)
        self._flights.add(flight)
        losses = 0
        try:
            while True:
                try:
                    async for chunk in self._run(flight):
                        yield chunk
                        if chunk.finish is not None:
                            return
                    if not flight.cut:
                        return
                    flight.cut = False
                except EngineLost:
                    losses += 1
                    if losses > _MOST_LOSSES or (flight.output and not flight.continuable):
                        raise
                if flight.left <= 0:
                    yield TokenChunk(ids_of(), Logprobs("f"), self.info().weight_version, FinishReason.LENGTH)
                    return
                await self._open.wait()
        finally:
            self._flights.discard(flight)
            await self._tell()

    async def _run(self, flight: _Flight) -> AsyncIterator[TokenChunk]:
        """The chunks of one submission. Ends without a finish when a pause cut it."""
        flight.running = True
        chunks = cast("Any", self.engine.generate(rest_of(flight.request, flight.output)))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    flight.output += chunk.ids
                    if chunk.finish is FinishReason.ABORT and flight.cut:
                        if chunk.ids:
                            yield replace(chunk, finish=None)
                        return
                    yield chunk
        finally:
            flight.running = False
            await self._tell()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling and let nobody in. A pause during a pause changes nothing. Raises EngineUnavailable."""
        async with self._control:
            await self._pause(mode)

    async def resume(self) -> None:
        """Go on. Raises EngineUnavailable while memory is released."""
        async with self._control:
            if self._released:
                raise EngineUnavailable("memory is released; POST /engine/resume_memory first")
            await self._resume()

    async def update_weights(self, path: str, version: int | None, mode: PauseMode) -> int:
        """Pause by `mode`, load the weights in folder `path`, go on if nothing was paused before; returns the version.

        Raises InvalidRequest when the weights do not fit: the old ones then stay.
        """
        async with self._control:
            return await self._while_paused(mode, lambda: self.engine.update_weights(path, version))

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step of a transfer on; the trainer pauses around all of them itself."""
        async with self._control:
            return await self.engine.transfer_weights(step, fields)

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""
        async with self._control:
            await self.engine.flush_cache()

    async def release_memory(self, tags: Sequence[str], mode: PauseMode) -> None:
        """Pause by `mode` (abort or drain: nothing may run) and give memory back. Stays paused."""
        async with self._control:
            was_paused = self._mode is not None
            await self._pause(mode)
            try:
                await self.engine.release_memory(tags)
            except EngineUnavailable:
                if not was_paused:
                    await self._resume()
                raise
            self._released.update(tags or (_ALL_MEMORY,))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory back; once all of it is there, go on."""
        async with self._control:
            await self.engine.resume_memory(tags)
            self._released = self._released - set(tags) if tags else set()
            if not self._released:
                await self._resume()

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()

    async def _while_paused(self, mode: PauseMode, work: Callable[[], Any]) -> int:
        was_paused = self._mode is not None
        await self._pause(mode)
        try:
            version: int = await work()
        finally:
            if not was_paused:
                await self._resume()
        return version

    async def _pause(self, mode: PauseMode) -> None:
        if self._mode is not None:
            return
        self._open.clear()
        try:
            if mode is PauseMode.DRAIN:
                await self._until(lambda: not self.running)
            elif mode is PauseMode.ABORT:
                await self._until(lambda: not any(f.running and not f.continuable for f in self._flights))
            self._mode = mode
            for flight in self._flights:
                flight.cut = flight.cut or (mode is PauseMode.ABORT and flight.running)
                flight.suspend(None)
            await self.engine.pause(PauseMode.IN_PLACE if mode is PauseMode.DRAIN else mode)
        except BaseException:
            for flight in self._flights:
                flight.cut = False
            self._let_in()
            raise

    async def _resume(self) -> None:
        if self._mode is None:
            return
        await self.engine.resume()
        self._let_in()

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
