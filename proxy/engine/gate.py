"""The gate between turns and the engine: admits requests, holds them during a pause, and resumes interrupted ones.

A request that is interrupted by a pause or a dead server is resubmitted with its prompt, the tokens sampled so far and
the rest of its token budget. Readers see one uninterrupted stream: no token is lost or repeated, and each token keeps
the weight version that sampled it. While no engine server is alive, requests wait as during a pause. The timeout for
the next token detects a silent engine, so it does not run while a request waits. An output under a grammar cannot be
continued from its middle, so a pause of mode ABORT waits until such outputs end. Every chunk of an engine is validated
here, before a reader sees it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from proxy.engine.callbacks import sampler
from proxy.engine.chunks import TakeChunk, TokenChunk, check_chunk
from proxy.engine.interface import AdapterEngine, Capability, Engine, EngineInfo, MortalEngine, PauseMode, ServerPool
from proxy.engine.pause_state import PauseState
from proxy.engine.requests import GenerateRequest, rest_of
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS
from proxy.side_columns.rows import SideColumn
from proxy.telemetry.groups import EngineMetrics
from proxy.types import Ids, Logprobs, ids_of
from tokengrove.errors import (
    SHUTTING_DOWN,
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineTimeout,
    EngineUnavailable,
    UnsupportedParameter,
)
from tokengrove.reasons import FinishReason

_RETRY_AFTER_S = 5.0
_MOST_LOSSES = 5
"""A request is resubmitted after at most this many servers were lost while they ran it. Then it fails with EngineLost,
since the request itself may kill servers. A server that was lost before it received the request does not count."""

_WAIT_S = 0.5
"""Seconds that a request waits after its second lost server. The wait doubles with each further lost server, so that
servers that die one after the other do not exhaust `_MOST_LOSSES`."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """An admitted request and its output so far.

    - `last_token_at`: the event loop's time of the latest token, or of the start of the wait for the first; infinite
      while the request waits to be resubmitted.
    - `running`: submitted to the engine. `left`: the tokens of the budget (`max_tokens`) that are not sampled yet.
    - `cut`: a pause aborts it in the engine; it is resubmitted afterwards. `interrupted`: the engine has ended it
      because it was cut. `again`: it was resubmitted after its first token.
    - `expired`: no token came in time, so `task` was cancelled. `cancels`: the number of earlier cancellations of
      `task` by others. `retried_elsewhere`: it expired once and was resubmitted to another server.
    - `vocab_size`: the vocabulary size of the model. `held`: the position after the last token whose experts are known.
      `resumed`: the number of tokens of the output when it was last submitted.
    """

    request: GenerateRequest
    take: TakeChunk
    clock: Callable[[], float]
    task: asyncio.Task[Any]
    cancels: int
    last_token_at: float
    left: int
    vocab_size: int
    output: Ids = field(default_factory=ids_of)
    running: bool = False
    cut: bool = False
    again: bool = False
    interrupted: bool = False
    expired: bool = False
    retried_elsewhere: bool = False
    held: int = 0
    resumed: int = 0

    @property
    def continuable(self) -> bool:
        """True if the rest can be sampled in a new submission, which excludes outputs under a grammar."""
        return self.request.grammar is None

    def receive(self, chunk: TokenChunk) -> FinishReason | None:
        """Take a chunk from the engine. Raises EngineFailed for an invalid chunk, which is ignored."""
        self.last_token_at = self.clock()
        check_chunk(chunk, self.vocab_size, self.left)
        self.output += chunk.ids
        self.left -= len(chunk.ids)
        if chunk.columns is not None and (experts := chunk.columns.get(EXPERTS)) is not None:
            chunk = replace(chunk, columns={**chunk.columns, EXPERTS: self._of_own_passes(experts)})
            self.held = max(self.held, experts.end)
        if self.again and chunk.cached_tokens is not None:  # later submissions also count the output so far
            chunk = replace(chunk, cached_tokens=None)
        if chunk.finish is FinishReason.ABORT and self.cut:
            self.interrupted = True
            told = chunk.ids or chunk.corrected or chunk.unsure or chunk.columns
            return self.take(replace(chunk, finish=None)) if told else None
        return self.take(chunk)

    def _of_own_passes(self, experts: SideColumn) -> SideColumn:
        """`experts` without the rows of tokens that another pass took in before: that of an earlier submission.

        An earlier submission sampled the tokens that follow them, perhaps with other weights.
        """
        prompt = self.request.prompt.length
        return experts.without(max(prompt, self.held), prompt + self.resumed - 1)

    def expire(self) -> None:
        """Give up waiting for a token."""
        self.expired = True
        self.task.cancel()


class Load(NamedTuple):
    """Numbers of requests: `in_flight` in the engine; `waiting` to be admitted or for an engine server."""

    in_flight: int
    waiting: int


class Gate:
    """The only path of requests to the engine. `EngineAdmin` closes it while the engine is paused.

    `state`: the pause. Its readers share this object. `info`: returns facts about the engine behind the gate.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: EngineMetrics | None = None) -> None:
        self.state = PauseState()
        self.info: Callable[[], EngineInfo] = engine.info
        self._engine, self._sample = engine, sampler(engine)
        self._servers = engine if isinstance(engine, ServerPool) else None
        self._has_adapters = isinstance(engine, AdapterEngine)
        self._metrics = metrics or EngineMetrics()
        self._settings = settings
        self._flights: set[_InFlight] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._ended: asyncio.Event | None = None
        self._arrivals: set[asyncio.Timeout] = set()
        self._stopping = False
        self._waiting = 0
        self._metrics.waiting.watch(lambda: self._waiting)
        self._metrics.paused.watch(lambda: self.state.paused is not None)
        self._metrics.version.watch(lambda: self.info().weight_version)

    @property
    def running(self) -> int:
        """The number of requests in the engine."""
        return sum(flight.running for flight in self._flights)

    @property
    def waiting(self) -> int:
        """The number of requests that wait to be admitted, or for an engine server that continues them."""
        return self._waiting

    @property
    def closed(self) -> bool:
        """True while new requests must wait: a pause holds them, or no engine server is alive."""
        return self.state.held or (self._servers is not None and not self._servers.alive)

    def check_alive(self) -> None:
        """Raise EngineUnavailable if the engine has died. It never recovers."""
        if isinstance(self._engine, MortalEngine) and self._engine.failure:
            raise EngineUnavailable(f"{self._engine.failure}; restart the server")

    def send_away(self) -> None:
        """Shut down: all requests that wait to be admitted or for an engine server raise EngineUnavailable immediately.

        So do requests that would have to wait later.
        """
        self._stopping = True
        for timer in self._arrivals:
            if not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())

    async def enter(self) -> None:
        """Wait until requests are admitted. Raises EngineUnavailable after `--pause-timeout-s` or on shutdown."""
        if self.closed:
            await self._patiently(self._admitted())

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason:
        """Sample a continuation, across pauses and lost servers; return the finish reason.

        `take` is called for each chunk. A reason that it returns ends sampling and is the result. Its exceptions are
        propagated. The engine has freed the request when this returns, raises or is cancelled.

        Raises EngineTimeout if no token comes for `--engine-timeout-s`, EngineFailed, and other errors of the engine;
        EngineLost only if more than five servers were lost while they ran the request, or if one is lost in the middle
        of an output under a grammar; EngineUnavailable if no engine server is alive for `--pause-timeout-s`;
        UnsupportedParameter for images if the engine does not take them; EngineIncapable for an adapter if it has none.
        """
        if request.images is not None:
            self._check_images()
        if request.adapter is not None:
            self._check_adapters(request.adapter)
        if self.closed:
            await self.enter()
        request.timeline.admitted = time.monotonic()
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        left, vocab_size = request.sampling.max_tokens or 0, self.info().vocab_size
        flight = _InFlight(request, take, loop.time, task, task.cancelling(), loop.time(), left, vocab_size)
        self._flights.add(flight)
        if self._alarm is None:
            self._look()
        try:
            return await self._run(flight)
        except BaseException as error:
            if flight.expired and task.uncancel() <= flight.cancels and isinstance(error, asyncio.CancelledError):
                limit_s = self._settings.engine_timeout_s
                raise EngineTimeout(f"the engine gave no token for {limit_s:g} s (--engine-timeout-s)") from None
            raise
        finally:
            self._flights.discard(flight)

    def _check_images(self) -> None:
        info = self.info()
        if Capability.IMAGES not in info.capabilities:
            raise UnsupportedParameter(
                f"the engine {info.name!r} does not take images for the model {info.model!r}; send text only",
                param="messages",
            )

    def _check_adapters(self, version: int) -> None:
        info = self.info()
        if not self._has_adapters or Capability.ADAPTERS not in info.capabilities:
            raise EngineIncapable(
                f"the engine {info.name!r} cannot sample with the adapter of version {version}, since it serves no "
                "adapters; name the base model"
            )

    async def hold(self, mode: PauseMode) -> None:
        """Stop admitting requests, and wait until the engine can be paused in `mode`. Timeouts then stop.

        Not serialised: call it through `EngineAdmin`, which then pauses the engine. Cancelling this reopens the gate.
        """
        self.state.close(mode)
        try:
            if mode is PauseMode.DRAIN:
                await self.until_idle()
            elif mode is PauseMode.ABORT:
                await self._until(lambda: not any(f.running and not f.continuable for f in self._flights))
        except BaseException:
            await self.let_in()
            raise
        self.state.enter(mode)
        for flight in self._flights:
            flight.cut = flight.cut or (mode is PauseMode.ABORT and flight.running)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def let_in(self) -> None:
        """Admit requests again, once the engine has resumed. Not serialised, like `hold`."""
        self.state.end()
        now = asyncio.get_running_loop().time()
        for flight in self._flights:
            if flight.last_token_at < math.inf:  # else it waits to be resubmitted, possibly for a server
                flight.last_token_at = now
        self._look()

    async def load(self) -> Load:
        """The current numbers of requests."""
        return Load(self.running, self.waiting)

    async def until_idle(self) -> None:
        """Wait until the engine runs no request. The gate must be held, or new requests keep arriving."""
        await self._until(lambda: not self.running)

    async def _admitted(self) -> None:
        """Wait until the gate is open and a server is alive. Both may change before the waiting task runs, so loop."""
        while self.closed:
            if self._servers is None or self.state.held:
                await self.state.admitting.wait()
            else:
                await self._servers.until_alive()

    async def _patiently(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Await `waiting`, counted in `waiting`. Raises EngineUnavailable after `--pause-timeout-s` or on shutdown."""
        limit_s = self._settings.pause_timeout_s
        self._waiting += 1
        try:
            async with asyncio.timeout(0 if self._stopping else limit_s) as timer:
                self._arrivals.add(timer)
                await waiting
        except TimeoutError:
            paused = f"generation has been paused for more than {limit_s:g} s (--pause-timeout-s); try again"
            dead = (
                f"no engine server has been alive for more than {limit_s:g} s (--pause-timeout-s); try again once one "
                "runs (GET /engine/servers says what is wrong with each)"
            )
            why = SHUTTING_DOWN if self._stopping else paused if self.state.held else dead
            raise EngineUnavailable(why, retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self._arrivals.discard(timer)
            self._waiting -= 1

    async def _readmitted(self, flight: _InFlight, wait_s: float) -> None:
        """Wait `wait_s` seconds, then until an interrupted request can be resubmitted.

        The wait for a server is limited to `--pause-timeout-s`, and a pause is not. Raises EngineUnavailable.
        """
        flight.last_token_at = math.inf
        await asyncio.sleep(wait_s)
        while self.closed:
            if self._servers is None or self.state.held:
                await self.state.admitting.wait()
                continue
            try:
                await self._patiently(self._servers.until_alive())
            except EngineUnavailable:
                if self._stopping or not self.state.held:  # else a pause has begun: wait for its end
                    raise
        flight.last_token_at = asyncio.get_running_loop().time()
        if self._alarm is None:
            self._look()

    def _look(self) -> None:
        """Expire requests without a token in time, and set the alarm for the next request that may expire.

        Does nothing during a pause; the end of the pause calls this again. All requests share one alarm, so a token
        costs no more than noting the time.
        """
        if self.state.paused is not None:
            return
        loop, limit_s = asyncio.get_running_loop(), self._settings.engine_timeout_s
        now, oldest = loop.time(), math.inf
        for flight in self._flights:
            if flight.expired:
                continue
            if flight.last_token_at + limit_s <= now:
                flight.expire()
            else:
                oldest = min(oldest, flight.last_token_at)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if oldest == math.inf else loop.call_at(oldest + limit_s, self._look)

    async def _run(self, flight: _InFlight) -> FinishReason:
        """Submit the request to the engine until its output has ended."""
        losses = 0
        while True:
            flight.running, flight.cut, flight.interrupted = True, False, False
            flight.again, flight.resumed, wait_s, cause = bool(flight.output), len(flight.output), 0.0, "pause"
            try:
                request = flight.request
                if flight.output or flight.held:
                    request = rest_of(request, flight.output, flight.held)
                finish = await self._sample(request, flight.receive)
                if not (flight.interrupted and finish is FinishReason.ABORT):
                    if finish is not None:
                        return finish
                    if not flight.cut:
                        raise EngineFailed("the engine ended its output without a finish reason")
            except EngineLost as lost:
                flight.request.timeline.note("engine_lost", reason=lost.message)
                cause, losses = "lost", losses + lost.ran
                if losses > _MOST_LOSSES or (flight.output and not flight.continuable):
                    raise
                wait_s = _WAIT_S * 2 ** (losses - 2) if lost.ran and losses > 1 else 0.0
            except asyncio.CancelledError:
                if not self._can_retry_elsewhere(flight):
                    raise
                flight.request.timeline.note("engine_lost", reason="no token in time")
                cause = "lost"
                self._retry_elsewhere(flight)
            finally:
                flight.running = False
                if self._ended is not None:
                    self._ended.set()
                    self._ended = None
            if flight.left <= 0:
                adapter = flight.request.adapter
                version = self.info().weight_version if adapter is None else adapter
                last = TokenChunk(ids_of(), Logprobs("f"), version, FinishReason.LENGTH)
                return flight.take(last) or FinishReason.LENGTH
            if wait_s or self.closed:
                await self._readmitted(flight, wait_s)
            flight.request.timeline.note("submitted_again", tokens=len(flight.output))
            self._metrics.resubmissions.by[(cause,)] += 1
            if cause == "lost" and self._servers is not None and flight.request.failures:
                self._servers.note_resubmission(flight.request.failures[-1])

    def _can_retry_elsewhere(self, flight: _InFlight) -> bool:
        """True if the request has expired for the first time, and an untried server can continue it."""
        return (
            flight.expired
            and not flight.retried_elsewhere
            and flight.task.cancelling() == flight.cancels + 1  # nobody else has cancelled it
            and (flight.continuable or not flight.output)
            and self._servers is not None
            and self._servers.has_other(flight.request.failures)
        )

    def _retry_elsewhere(self, flight: _InFlight) -> None:
        """Undo the expiry of a request, and restart the timeout for its next token."""
        flight.task.uncancel()
        flight.expired, flight.retried_elsewhere = False, True
        flight.last_token_at = asyncio.get_running_loop().time()
        if self._alarm is None:
            self._look()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            ended = self._ended = self._ended or asyncio.Event()
            await ended.wait()
