"""The gate between turns and the engine: admits requests, holds them during a pause, and resumes interrupted ones.

A request that a pause or a dead server interrupts is submitted again with its prompt, the tokens sampled so far and the
rest of its token budget. Readers see one uninterrupted stream: no token is lost or repeated, and each token keeps the
weight version that sampled it. The timeout for the next token measures a silent engine, so it does not run while the
engine is paused. An output under a grammar cannot be continued from its middle, so a pause of mode ABORT waits until
such outputs end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from proxy.engine.callbacks import sampler
from proxy.engine.chunks import TakeChunk, TokenChunk, check_chunk
from proxy.engine.interface import Engine, EngineInfo, PauseMode
from proxy.engine.requests import GenerateRequest, rest_of
from proxy.errors import SHUTTING_DOWN, EngineFailed, EngineLost, EngineTimeout, EngineUnavailable
from proxy.reasons import FinishReason
from proxy.settings import Settings
from proxy.types import Ids, Logprobs, ids_of

_RETRY_AFTER_S = 5.0
_MOST_LOSSES = 5
"""Lost servers after which a request fails with EngineLost instead of being submitted again."""


@dataclass(slots=True, eq=False)
class _Flight:
    """An admitted request and its output so far.

    `heard`: the time of the event loop when the latest token came, or when waiting for the first began; infinite while
    the request waits to be submitted again. `running`: submitted to the engine. `cut`: a pause aborted it in the
    engine; it is submitted again afterwards. `again`: that has happened, after its first token. `interrupted`: the
    engine has ended it because it was cut. `expired`: no token came in time, so `task` was cancelled. `cancels`: how
    many times others had cancelled that task before.
    """

    request: GenerateRequest
    take: TakeChunk
    clock: Callable[[], float]
    task: asyncio.Task[Any]
    cancels: int
    heard: float
    vocab_size: int
    output: Ids = field(default_factory=ids_of)
    running: bool = False
    cut: bool = False
    again: bool = False
    interrupted: bool = False
    expired: bool = False

    @property
    def continuable(self) -> bool:
        """True if the rest can be sampled in a new submission: not under a grammar."""
        return self.request.grammar is None

    @property
    def left(self) -> int:
        """Tokens of the budget (`max_tokens`) that are not sampled yet."""
        return (self.request.sampling.max_tokens or 0) - len(self.output)

    def hear(self, chunk: TokenChunk) -> FinishReason | None:
        """Take a chunk from the engine. Raises EngineFailed for one that cannot be right, and takes nothing of it."""
        self.heard = self.clock()
        check_chunk(chunk, self.vocab_size, self.left)
        self.output += chunk.ids
        if self.again and chunk.cached_tokens is not None:  # only the first submission counts the prompt alone
            chunk = replace(chunk, cached_tokens=None)
        if chunk.finish is FinishReason.ABORT and self.cut:
            self.interrupted = True
            return self.take(replace(chunk, finish=None)) if chunk.ids or chunk.corrected else None
        return self.take(chunk)

    def expire(self) -> None:
        """Give up waiting for a token."""
        self.expired = True
        self.task.cancel()


class Load(NamedTuple):
    """Numbers of requests: `in_flight` in the engine, `waiting` to be admitted."""

    in_flight: int
    waiting: int


class Gate:
    """The only path of requests to the engine. `EngineAdmin` holds it while it pauses the engine, and lets in again.

    `waiting`: the number of requests that wait to be admitted.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._sample = engine, sampler(engine)
        self.waiting = 0
        self._settings = settings
        self._flights: set[_Flight] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._ended = asyncio.Event()
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

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason:
        """Sample a continuation, across pauses and lost servers; return why it ended.

        `take` is called for each chunk. A reason that it returns ends sampling and is the result; what it raises is
        raised here. The engine is free of the request when this returns, raises or is cancelled.

        Raises EngineTimeout if no token comes for `--engine-timeout-s`, EngineFailed, and what else the engine raises;
        EngineLost only after more than five lost servers, or if a server is lost in the middle of an output under a
        grammar.
        """
        if not self._open.is_set():
            await self.enter()
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        flight = _Flight(request, take, loop.time, task, task.cancelling(), loop.time(), self.info().vocab_size)
        self._flights.add(flight)
        if self._alarm is None:
            self._look()
        try:
            return await self._fly(flight)
        except BaseException as error:
            if flight.expired and task.uncancel() <= flight.cancels and isinstance(error, asyncio.CancelledError):
                limit_s = self._settings.engine_timeout_s
                raise EngineTimeout(f"the engine gave no token for {limit_s:g} s (--engine-timeout-s)") from None
            raise
        finally:
            self._flights.discard(flight)

    async def hold(self, mode: PauseMode) -> None:
        """Admit no request, and wait until the engine can be paused by `mode`; from then on no timeout runs.

        Not serialised: call it through `EngineAdmin`, which then pauses the engine. A hold that is cancelled is undone.
        """
        self._open.clear()
        try:
            if mode is PauseMode.DRAIN:
                await self.until_idle()
            elif mode is PauseMode.ABORT:
                await self._until(lambda: not any(f.running and not f.continuable for f in self._flights))
        except BaseException:
            await self.let_in()
            raise
        self._mode = mode
        for flight in self._flights:
            flight.cut = flight.cut or (mode is PauseMode.ABORT and flight.running)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def let_in(self) -> None:
        """Admit requests again, once the engine has resumed. Not serialised, like `hold`."""
        self._mode = None
        now = asyncio.get_running_loop().time()
        for flight in self._flights:
            flight.heard = now
        self._look()
        self._open.set()

    async def load(self) -> Load:
        """How many requests are here now."""
        return Load(self.running, self.waiting)

    async def until_idle(self) -> None:
        """Wait until the engine runs no request. The gate must be held, or new ones keep coming."""
        await self._until(lambda: not self.running)

    async def _wait_open(self) -> None:
        """Wait until the gate is open. Loop: a new pause may shut it before the waiting task runs."""
        while not self._open.is_set():
            await self._open.wait()

    def _look(self) -> None:
        """Expire requests that no token came for in time; look again when the next one may be due.

        One alarm for all requests: a token then costs no more than noting the time.
        """
        loop, limit_s = asyncio.get_running_loop(), self._settings.engine_timeout_s
        now, oldest = loop.time(), math.inf
        for flight in self._flights:
            if flight.expired:
                continue
            if flight.heard + limit_s <= now:
                flight.expire()
            else:
                oldest = min(oldest, flight.heard)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if oldest == math.inf else loop.call_at(oldest + limit_s, self._look)

    async def _fly(self, flight: _Flight) -> FinishReason:
        """Submit the request to the engine until its output has ended."""
        losses = 0
        while True:
            flight.running, flight.cut, flight.interrupted = True, False, False
            flight.again = bool(flight.output)
            try:
                finish = await self._sample(rest_of(flight.request, flight.output), flight.hear)
                if not (flight.interrupted and finish is FinishReason.ABORT):
                    if finish is not None:
                        return finish
                    if not flight.cut:
                        raise EngineFailed("the engine ended its output without a finish reason")
            except EngineLost:
                losses += 1
                if losses > _MOST_LOSSES or (flight.output and not flight.continuable):
                    raise
            finally:
                flight.running = False
                self._ended.set()
            if flight.left <= 0:
                last = TokenChunk(ids_of(), Logprobs("f"), self.info().weight_version, FinishReason.LENGTH)
                return flight.take(last) or FinishReason.LENGTH
            if not self._open.is_set():
                flight.heard = math.inf
                await self._wait_open()
                flight.heard = flight.clock()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._ended.clear()
            await self._ended.wait()
