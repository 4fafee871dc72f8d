"""Several engine servers as one engine: each request goes where it costs least (`proxy.engine.servers.placement`).

A server that dies is ejected immediately, and returns when it answers with the weights of the others. Its requests
raise EngineLost, and the gate resubmits them elsewhere. A request that a server fails is sent to one other server, and
the failure counts against the first server (`proxy.engine.servers.breaker`) if the other answers. Servers join and
leave at run time; each samples a token before it is used. Once weights are updated through the pool, every server in it
serves them: tokens of a server that restarted with older weights are discarded. All have the same LoRA adapters
(`proxy.engine.servers.pool_adapters`), and a request that names one is never sampled without it. Every pause is noted
beforehand (`proxy.engine.pauses`), so that it ends even if this process dies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import reduce
from typing import Any, cast

from proxy.engine.callbacks import generated
from proxy.engine.chunks import TakeChunk, TokenChunk
from proxy.engine.interface import MEMORY_TAGS, AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.pauses import Pauses
from proxy.engine.requests import Failure, GenerateRequest
from proxy.engine.servers.connection import server_url
from proxy.engine.servers.events import ServerEvents
from proxy.engine.servers.joining import PoolState, bring, follow, part
from proxy.engine.servers.placement import RETRY_AFTER_S, Member, SessionPlacement, named_failure
from proxy.engine.servers.pool_adapters import PoolAdapters
from proxy.engine.servers.remote import AdapterLost, RemoteEngine, started
from proxy.engine.servers.same_model import OtherModel
from proxy.engine.servers.transfer import Transfer, rank_offset, with_rank_offset
from proxy.engine.servers.trust import Trust, failure_of
from proxy.progress import step
from proxy.types import PauseNote
from tokengrove.errors import (
    ConfigurationError,
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
)
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

logger = logging.getLogger(__name__)

_SILENT_S = 20.0
"""A request that is cancelled after this many seconds without a token makes its server doubtful."""

_NEARLY = 0.9
"""The fraction of the gate's timeout that is the upper limit of `_SILENT_S`. It is below 1, since part of the timeout
may pass before the request reaches the server."""

_CHECK_S = 1.0
"""Seconds between health checks. A request in flight detects the loss of its server sooner."""


class Pool:
    """Implements `proxy.engine.interface.Engine` over `connect(url)` for each URL."""

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], Awaitable[RemoteEngine]],
        *,
        start_timeout_s: float,
        check_s: float = _CHECK_S,
        engine_timeout_s: float = math.inf,
        replay: frozenset[Replay] = frozenset(),
    ) -> None:
        """`connect` starts the engine of a URL. `start_timeout_s`: the limit of `start`. `check_s`: the time between
        health checks. `engine_timeout_s`: the gate's timeout for the next token. All are in seconds. `replay`: the side
        columns that every server has to record.

        Raises ConfigurationError without URLs, and InvalidRequest for a malformed URL.
        """
        if not urls:
            raise ConfigurationError("--engine names no engine server; give at least one URL, http://HOST:PORT")
        self._connect = connect
        self._start_timeout_s = start_timeout_s
        self._check_s = check_s
        self._replay = replay
        self._silent_s = min(_SILENT_S, _NEARLY * engine_timeout_s)
        self.leads, self.busy_elsewhere = True, False
        self.pauses = Pauses()
        self._members: list[Member] = []
        self._missing = dict.fromkeys(map(server_url, urls), "not reached yet")
        self._placement = SessionPlacement(self._members)
        self._summed_up: tuple[tuple[EngineInfo, ...], int, int] = ((), 0, 0)
        self._info: EngineInfo
        self._state = PoolState()
        self._transfer = Transfer()
        self._changes = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._arrived = asyncio.Event()
        self._events = ServerEvents(lambda: not self.pauses.leads)
        self._adapters = PoolAdapters(self._alive, self._eject, self._events)
        # Each process counts failures for itself, so each logs them.
        self._trust = Trust(self._members, lambda: self._resting, ServerEvents())
        self._looks: dict[Member | str, asyncio.Task[None]] = {}
        self._partings: dict[str, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._renewer: asyncio.Task[None] | None = None
        self._restored: set[str] = set()
        self._without_memory: set[str] = set()
        self._continuing = asyncio.Lock()

    async def start(self) -> None:
        """Wait until a server answers, and log why none does.

        Raises ConfigurationError if none answers in time, and at once if one can never join or does not record what it
        has to, or all serve another model.
        """
        deadline, told = asyncio.get_running_loop().time() + self._start_timeout_s, ""
        while True:
            await self._find_left()
            failures = await self._reach_all()
            if self._members:
                break
            reasons = "; ".join(named_failure(url, why) for url, why in self._missing.items())
            if failures and all(isinstance(failure, OtherModel) for failure in failures):
                raise ConfigurationError(f"--engine: {reasons}")
            if asyncio.get_running_loop().time() > deadline:
                raise ConfigurationError(
                    f"--engine: no engine server answered within {self._start_timeout_s:g} s ({reasons}); "
                    "check the URLs, or wait longer with --engine-arg start_timeout_s=SECONDS"
                )
            if reasons != told:
                logger.warning(
                    "no engine server answers yet; waiting up to %(limit_s)g s (%(reasons)s)",
                    {"limit_s": self._start_timeout_s, "reasons": reasons},
                )
                told = reasons
            await asyncio.sleep(self._check_s)
        self._info = self.info()
        step(f"reached {len(self._members)} of {len(self._members) + len(self._missing)} engine servers")
        for url, why in self._missing.items():
            self._events.warning("engine server is missing", url, reason=why)
        self._watcher = asyncio.create_task(self._watch())
        self._renewer = asyncio.create_task(self.pauses.run(self._continue_left))

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample a continuation. Raises EngineLost if another server should continue.

        Raises EngineUnavailable if no server is alive, and otherwise the error of the server.
        """
        prompt_tokens, state, adapter = request.prompt.length, self._state, request.adapter
        if adapter is not None:
            request.adapter_name = self._adapters.name_of(adapter)
        member = self._placement.choose(request.session_id, request.failures, prompt_tokens, request.group_id, adapter)
        member.in_flight += 1
        member.served += 1
        given, began, sampler = 0, time.monotonic(), member.sampler

        def checked(chunk: TokenChunk) -> FinishReason | None:
            nonlocal given
            if chunk.cached_tokens is not None:  # reported once for each request
                member.prompt_tokens += prompt_tokens
                member.cached_tokens += chunk.cached_tokens
            if not chunk.ids:
                return take(chunk)
            chunk.sampler = sampler
            if state.managed and not self._changes and adapter is None:
                self._check_version(member, chunk.version, state)
            finish = take(chunk)
            given += len(chunk.ids)
            if member.doubtful:
                self._trust.clear(member)
            return finish

        try:
            finish = await member.engine.sample(request, checked)
            if finish is None and state is self._state and not self._resting:
                raise EngineFailed(f"{member.url} ended its output without a finish reason")
        except asyncio.CancelledError:
            silent = EngineLost(f"{member.url} gave no token for {time.monotonic() - began:.0f} s")
            if not given and time.monotonic() - began >= self._silent_s:
                self._trust.doubt(member, silent)
            request.failures.append(failure_of(member, silent))  # for the gate, if its timeout cancelled this
            raise
        except AdapterLost as error:
            request.failures.append(failure_of(member, error))
            await self._restore_adapters(member)
            raise
        except EngineLost as error:
            request.failures.append(failure_of(member, error))
            await self._suspect(member, error)
            error.ran = error.ran or member.alive
            raise
        except (EngineFailed, EngineUnavailable) as error:
            self._trust.doubt(member, error)
            begun = given > 0 and request.grammar is not None
            final = begun or not all(failure.lost for failure in request.failures)
            request.failures.append(failure_of(member, error))
            if final or not self._placement.untried(request.failures):
                raise
            raise EngineLost(error.message).showing(error.shown) from error
        else:
            breaker = member.breaker
            told = breaker.open or breaker.score or request.failures  # else there is nothing to forgive or to blame
            if told and finish is not None and finish is not FinishReason.ABORT:
                self._trust.credit(member, request.failures)
            return finish
        finally:
            member.in_flight -= 1
            self._placement.note_output(request.session_id, member, prompt_tokens + given, adapter)
            if member.leaving and not member.in_flight and member in self._members:
                self._drop(member)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same, as a generator."""
        return generated(self.sample, request)

    async def abort(self, request_id: str) -> None:
        """Abort a request on whichever server runs it."""
        with suppress(EngineLost):  # a lost server runs nothing
            await asyncio.gather(*(member.engine.abort(request_id) for member in self._members))

    async def pause(self, mode: PauseMode) -> None:
        """Pause every server."""
        async with self._change(mode=mode):
            await self.pauses.begin([member.url for member in self._alive()], mode, self._state.released)
            for member in self._alive():
                member.paused = True
            await self._on_all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """Resume every server. One that does not answer is ejected, and resumed when it returns."""
        async with self._change(mode=None):
            members = self._alive()
            results = await asyncio.gather(*(m.engine.resume() for m in members), return_exceptions=True)
            for member, result in zip(members, results, strict=True):
                member.paused = isinstance(result, BaseException)
                self._judge(member, result)
            self._transfer.end()
            await self._end_notes()

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load the same weights on every server. A server that fails to load them is ejected until it has them."""
        new = self._state.version + 1 if version is None else version
        async with self._change(weights=(path, new), version=new, managed=True):
            await self._on_all(lambda engine: engine.update_weights(path, new, busy=self.busy_elsewhere))
            self._transfer.end()
            self._transfer.torn -= {member.url for member in self._alive()}
        self._placement.forget(*self._members)  # servers empty their caches
        return new

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step to every server.

        `rank_offset` (INIT_GROUP; in `init_info` of INIT_ENGINE) is the offset of the first server. In the order of
        `servers`, each further server starts after the ranks of the previous one. Raises InvalidRequest if it is not an
        integer.

        A server that joined after the transfer began is ejected, since it would report a version of which it lacks
        parts. Raises EngineUnavailable if all servers did.
        """
        offset = rank_offset(fields)
        for member in self._transfer.latecomers(step, fields.get("weight_version"), self._alive()):
            self._eject(member, "it joined in the middle of a weight transfer, of which it lacks the beginning")
        bodies: dict[str, Mapping[str, Any]] = {}
        for member in self._alive():
            bodies[member.url] = fields if offset is None else with_rank_offset(fields, offset)
            offset = None if offset is None else offset + member.engine.world_size
        async with self._change():
            versions = await self._on_all(lambda engine: engine.transfer_weights(step, bodies[engine.url]))
            if fields.get("weight_version") is not None:
                self._state = replace(self._state, weights=None, version=max(versions), managed=True)
                self._placement.forget(*self._members)
        return self._state.version

    async def load_adapter(self, version: int, source: AdapterSource) -> None:
        """Load an adapter on every server, or on none. Requests run meanwhile."""
        await self._adapters.load(version, source)

    async def unload_adapter(self, version: int) -> None:
        """Unload an adapter on every server. Unknown versions are ignored."""
        await self._adapters.unload(version)

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Release memory on every server."""
        kinds = frozenset(tags or MEMORY_TAGS)
        released = self._state.released | kinds
        async with self._change(released=released):
            await self._note_memory(released)
            for member in self._alive():
                member.released |= kinds
            await self._on_all(lambda engine: engine.release_memory(tags))
        self._placement.forget(*self._members)

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Resume memory on every server."""
        left = self._state.released - frozenset(tags or MEMORY_TAGS)
        async with self._change(released=left):
            if self._alive():  # returning servers have their memory, or resume it when they join
                await self._on_all(lambda engine: engine.resume_memory(tags))
            for member in self._alive():
                member.released = left
            await self._note_memory(left)

    async def flush_cache(self) -> None:
        """Empty the prefix cache of every server."""
        await self._on_all(lambda engine: engine.flush_cache())
        self._placement.forget(*self._members)

    def forget_session(self, session_id: str) -> None:
        """Count what servers hold of a session no longer, as it has ended."""
        self._placement.release(session_id)

    def info(self) -> EngineInfo:
        """Facts that hold for all servers: shared capabilities, shortest context, highest weight version."""
        infos, alive = [], 0
        for member in self._members:
            if member.alive:
                infos.append(member.engine.info())
                alive += 1
        if not alive:
            infos = [member.engine.info() for member in self._members]
            if not infos:  # all servers were removed; requests wait for a new one
                return self._info
        facts = tuple(infos), alive, len(self._members) + len(self._missing)
        if facts != self._summed_up:  # cached, since every turn calls this
            self._summed_up, self._info = facts, _sum_up(*facts)
        return self._info

    async def close(self) -> None:
        """Close the connections. The servers keep running; those that the pool paused are resumed."""
        tasks = [task for task in (self._watcher, self._renewer, *self._looks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trust.rest()
        if partings := list(self._partings.values()):
            await asyncio.wait(partings)
        await asyncio.gather(*map(self._part, self._members))
        await self._end_notes()

    def common(self) -> dict[str, Any]:
        """The state of the pool, and the URLs of its servers."""
        state = self._state
        staying = [member.url for member in self._members if not member.leaving]
        return {
            "mode": state.mode,
            "weights": state.weights,
            "version": state.version,
            "managed": state.managed,
            "released": sorted(state.released),
            "urls": [*staying, *self._missing],
        }

    async def adopt(self, common: Mapping[str, Any]) -> None:
        """Adopt the state of the leading process, and try to reach its servers. Raises EngineIncapable."""
        told = dict(common)
        urls, mode, weights = told.pop("urls"), told.pop("mode"), told.pop("weights")
        before = self._state
        self._state = state = PoolState(
            **{**told, "released": frozenset(told["released"])},
            mode=None if mode is None else PauseMode(mode),
            weights=None if weights is None else (weights[0], weights[1]),
        )
        if state.version != before.version or state.released:
            self._placement.forget(*self._members)
        if self._resting:
            await self._trust.rest()
        await self._have(urls)
        version = state.version if state.managed else None
        for member in self._alive():
            member.paused, member.released = state.mode is not None, state.released
        await asyncio.gather(*(member.engine.follow(state.mode, version) for member in self._alive()))

    async def _have(self, urls: Sequence[str]) -> None:
        """Make `urls` the servers of the pool, and try to reach the new ones."""
        for member in self._members:
            member.leaving = member.leaving and member.url not in urls
        self._arrived.set()
        known = {member.url for member in self._members if not member.leaving} | self._missing.keys()
        for url in known - set(urls):
            await self.remove(url)
        new = [url for url in urls if url not in known]
        for url in new:
            self._missing[url] = "joining"
        if self._watcher is not None:
            await asyncio.gather(*map(self._look_at, new))

    @property
    def left_over(self) -> tuple[PauseMode, frozenset[str]] | None:
        """After `start`: the pause of an earlier server that is still in force, and the memory that it released."""
        return None if self._state.mode is None else (self._state.mode, self._state.released)

    @property
    def alive(self) -> bool:
        """True while a server is known to take requests."""
        for member in self._members:  # noqa: SIM110  # every turn asks this, and a generator costs more than the answer
            if member.alive and not member.leaving:
                return True
        return False

    def has_other(self, failures: Sequence[Failure]) -> bool:
        """True if a server that is not named in `failures` takes requests."""
        return bool(self._placement.untried(failures))

    def note_resubmission(self, failure: Failure) -> None:
        """Count a request that is resubmitted after this failure, for the log."""
        self._events.lost(failure.url, failure.why)

    def check_alive(self) -> None:
        """Raise EngineUnavailable with the reason, unless a server is known to take requests."""
        self._placement.candidates()

    async def until_alive(self) -> None:
        """Wait until a server takes requests."""
        while not self.alive:
            self._arrived.clear()
            await self._arrived.wait()

    def servers(self) -> list[dict[str, Any]]:
        """One dict per server: url, state, failure; once reached also in_flight, served, session_count, version and
        the counts of prompt_tokens and cached_tokens."""
        sessions = self._placement.sessions()
        shown = [
            {
                "url": member.url,
                "state": member.state,
                "in_flight": member.in_flight,
                "served": member.served,
                "session_count": sessions[member.url],
                "prompt_tokens": member.prompt_tokens,
                "cached_tokens": member.cached_tokens,
                "version": member.engine.info().weight_version,
                "failure": member.failure or None,
            }
            for member in self._members
        ]
        return shown + [{"url": url, "state": "missing", "failure": why} for url, why in self._missing.items()]

    async def show(self) -> list[dict[str, Any]]:
        """The same as `servers`."""
        return self.servers()

    async def add(self, url: str) -> None:
        """Add a server, or keep a leaving one. Raises InvalidRequest if it is already in the pool or cannot join."""
        url = server_url(url)
        for member in self._members:
            if member.url == url and member.leaving:
                member.leaving = False
                self._arrived.set()
                return
        if url in self._missing or any(member.url == url for member in self._members):
            raise InvalidRequest(f"{url} is in the pool already", param="url")
        self._missing[url] = "joining"
        try:
            await self._look_at(url)
        finally:
            why = self._missing.pop(url, None)
        if why is not None:
            raise InvalidRequest(f"the server cannot join the pool: {named_failure(url, why)}", param="url")

    async def remove(self, url: str) -> None:
        """Send a server no more requests, and remove it after its last one. Raises InvalidRequest if it is unknown."""
        url = server_url(url)
        if self._missing.pop(url, None) is not None:
            return
        found = [member for member in self._members if member.url == url and not member.leaving]
        if not found:
            raise InvalidRequest(f"{url} is not in the pool", param="url")
        found[0].leaving = True
        if not found[0].in_flight:
            parting = self._drop(found[0])
            if not self._changes:  # else it continues in the background
                await asyncio.shield(parting)

    def _alive(self) -> list[Member]:
        """The servers that pauses and weights apply to, including leaving servers, which still run requests."""
        return [member for member in self._members if member.alive]

    @property
    def _resting(self) -> bool:
        """True while servers must not sample: they are paused, have released memory, or are being changed."""
        return self._state.mode is not None or bool(self._state.released) or self._changes > 0

    @asynccontextmanager
    async def _change(self, **fields: Any) -> AsyncIterator[None]:
        """Change `fields` of the state, unless the body fails. Meanwhile no server joins, is proved or is resumed."""
        before, after = self._state, replace(self._state, **fields)
        self._changes += 1
        self._settled.clear()
        try:
            await self._trust.rest()
            async with self._continuing:  # else the end of an earlier pause could reach a server after this change
                pass
            yield
            if fields:
                self._state = after
        except ProxyError:
            self._state = before
            raise
        finally:
            self._changes -= 1
            if not self._changes:
                self._settled.set()

    async def _on_all(self, work: Callable[[RemoteEngine], Awaitable[Any]]) -> list[Any]:
        """Run `work` on every server that is alive. If only some servers fail, they are ejected until they agree.

        Raises the first error if all servers fail, and EngineUnavailable if no server is alive.
        """
        members = self._alive()
        if not members:
            raise EngineUnavailable("no engine server is available", retry_after_s=RETRY_AFTER_S)
        results = await asyncio.gather(*(work(member.engine) for member in members), return_exceptions=True)
        if all(isinstance(result, BaseException) for result in results):
            raise cast("BaseException", results[0])
        for member, result in zip(members, results, strict=True):
            self._judge(member, result)
        return [result for result in results if not isinstance(result, BaseException)]

    def _judge(self, member: Member, result: Any) -> None:
        """Eject a server whose `result` is a ProxyError; raise any other exception."""
        if isinstance(result, ProxyError):
            self._eject(member, result.message)
        elif isinstance(result, BaseException):
            raise result

    def _check_version(self, member: Member, version: int, at: PoolState) -> None:
        """Raise EngineLost for tokens of older weights than those of the pool when the request began (`at`)."""
        if version < min(at.version, self._state.version):
            raise EngineLost(f"{member.url} was restarted with weight version {version}")

    async def _suspect(self, member: Member, error: EngineLost) -> None:
        """Handle a lost reply: the server becomes doubtful, and is ejected unless it answers."""
        self._trust.doubt(member, error)
        if member.alive:
            with suppress(ProxyError):  # the member's `failure` has the reason
                await self._examine(member)

    async def _restore_adapters(self, member: Member) -> None:
        """Give a server the adapters that it has lost, unless it serves older weights, too, and is ejected."""
        if member.alive:
            with suppress(ProxyError):  # the member's `failure` has the reason
                await self._examine(member)
        if member.alive:
            await self._give_adapters(member)

    async def _give_adapters(self, member: Member) -> None:
        """Give a server the adapters that it lacks. It is ejected if it does not take them.

        If it does not answer, that is left to the next health check, as it may be busy.
        """
        try:
            await self._adapters.give(member.engine)
        except EngineLost:
            return
        except EngineUnavailable as error:
            self._eject(member, error.message)

    def _eject(self, member: Member, why: str) -> None:
        """Eject a server and cut its replies, which may hang or stay paused. The gate resubmits them elsewhere."""
        if member.alive:
            self._events.warning("engine server is lost", member.url, reason=why, requests=member.in_flight or None)
        member.alive, member.failure = False, why
        self._transfer.lose(member)
        self._placement.forget(member)  # it may return without its cache
        member.engine.cut()
        self._tell_alive()

    async def _examine(self, member: Member) -> None:
        """Eject a server that is lost (and raise its error) or serves older weights than the pool loaded."""
        state = self._state
        try:
            version = await self._version_of(member)
        except (EngineLost, EngineUnavailable) as error:
            self._eject(member, error.message)
            raise
        if state is not self._state or self._changes or not member.alive:
            return
        if state.managed and version < state.version:
            self._eject(member, f"it serves weight version {version}, the others serve {state.version}")
        elif version > state.version:  # weights were updated on the servers directly
            self._events.warning("engine server has newer weights", member.url, version=version, before=state.version)
            self._state = replace(state, version=version, weights=None, managed=False)

    async def _version_of(self, member: Member) -> int:
        """The weight version of a server. It is asked twice, since a server that misses one probe may be busy."""
        with suppress(EngineLost):
            return await member.engine.check()
        return await member.engine.check()

    async def _agree(self, member: Member, *, proven: bool = False) -> None:
        """Bring a server to the pool's state, again if the state changes meanwhile, and mark it alive.

        Unless it is `proven`, it samples a token first. While servers must not sample, this is postponed, and the
        server is doubtful until then. Raises EngineLost or EngineUnavailable.
        """
        if (fault := member.engine.info().why_unrecorded(self._replay)) is not None:
            raise EngineUnavailable(f"the server does not record {fault[0]} (--replay): {fault[1]}")
        await self._continue(member.engine)
        while True:
            await self._settled.wait()
            state = self._state
            leads = self.leads and member.url not in self._restored
            if state.mode is not None and leads and not state.released:  # else this process does not pause it
                await self.pauses.begin([member.url], state.mode)
            alone = not self._alive()
            if leads:
                version = await bring(member, state, alone=alone, torn=member.url in self._transfer.torn)
            else:
                version = await follow(member, state, alone=alone)
            if state.weights is not None:
                self._transfer.torn.discard(member.url)
            revision = await self._adapters.give(member.engine) if self.leads else self._adapters.revision
            if not proven and state is self._state:
                proven = await self._prove(member.engine)
            settled = state is self._state and not self._changes and revision == self._adapters.revision
            if settled and (version == state.version or not self._alive()):
                break  # else another server joined first, and this one must not keep its own weights
        if version != state.version:
            self._state = replace(state, version=version, weights=None, managed=False)
        self._restored.discard(member.url)
        member.alive, member.doubtful, member.failure = True, not proven, ""
        if proven:
            self._trust.readmit(member)
        self._arrived.set()
        self._events.info("engine server joined", member.url, version=version, proven=proven)

    async def _prove(self, engine: RemoteEngine) -> bool:
        """Make a joining server sample a token; return False if this must wait. Raises EngineUnavailable."""
        try:
            return await self._trust.prove(engine, follows=not self.leads and self._watcher is not None)
        except ProxyError as error:
            why = named_failure(engine.url, error.message)
            raise EngineUnavailable(f"the server does not sample a token: {why}") from None

    def _drop(self, member: Member) -> asyncio.Task[None]:
        """Remove a server from the pool; return the task that parts from it."""
        self._members.remove(member)
        self._transfer.lose(member)
        self._events.info("engine server left", member.url)
        self._placement.forget(member)
        task = self._partings[member.url] = asyncio.create_task(self._part_for_good(member))
        task.add_done_callback(lambda _: self._partings.pop(member.url))
        return task

    async def _part_for_good(self, member: Member) -> None:
        if (look := self._looks.get(member)) is not None:  # it may be bringing back a server that may join again
            look.cancel()
            await asyncio.wait([look])
        await self._settled.wait()  # a pause in progress must not arrive after its end
        self.pauses.leave(member.url)
        await self._part(member)
        if not member.paused or member.released:  # else the next process that reaches it resumes it
            await self.pauses.continued(member.url)

    async def _part(self, member: Member) -> None:
        """Close the connection to a server. Only the leading process can have paused it."""
        await (part(member) if self.leads else member.engine.close())

    async def _find_left(self) -> None:
        """Find the servers that an earlier process left paused. If memory was released, the pause continues until it is
        resumed.

        Sampling without that memory would crash a server, and only the trainer knows when it can be resumed.
        """
        await self.pauses.look()
        released = [note for note in self.pauses.left.values() if note.released]
        if released and not self._resting:
            mode, kinds = PauseMode(released[0].mode), frozenset(released[0].released.split(","))
            logger.warning(
                "the pause of an earlier server goes on, as it had released memory (%(released)s): "
                "POST /engine/resume_memory takes it back and lets requests in",
                {"released": released[0].released, "mode": mode.value},
            )
            self._state = replace(self._state, mode=mode, released=kinds)
            self._restored |= self.pauses.left.keys()
            self.pauses.take_over()

    def _tell_alive(self) -> None:
        alive = self.alive
        reasons = [named_failure(member.url, member.failure) for member in self._members if member.failure]
        self._events.alive(alive, next((member.url for member in self._alive()), "") if alive else "; ".join(reasons))

    async def _continue_left(self) -> None:
        """Resume the engine servers that another server left paused."""
        for member in self._alive():
            with suppress(ProxyError):  # retried at the next look at the notes
                await self._continue(member.engine)

    async def _continue(self, engine: RemoteEngine) -> None:
        """Resume an engine server that a server left paused when it ended. Raises like `resume`."""
        if engine.url not in self.pauses.left:
            return
        async with self._continuing:
            note = self.pauses.left.get(engine.url)
            if note is None or self._resting or not self.pauses.leads:
                return
            if note.released:
                self._tell_memory(note)
                return
            await engine.resume()
        logger.warning(
            "engine server %(server)s is continued: %(owner)s paused it and ended without that",
            {"server": engine.url, "owner": note.owner},
        )
        await self.pauses.continued(engine.url)

    def _tell_memory(self, note: PauseNote) -> None:
        """Log once that a server stays paused, since sampling without its memory would crash it."""
        if note.url not in self._without_memory:
            self._without_memory.add(note.url)
            logger.warning(
                "engine server %(server)s stays paused: %(owner)s released its memory (%(released)s) and ended; start "
                "%(owner)s again and POST /engine/resume_memory there, or restart the engine server",
                {"server": note.url, "owner": note.owner, "released": note.released},
            )

    async def _end_note(self, member: Member) -> None:
        """Forget the note of a server that has just joined, unless it is paused: a pause that has begun noted it again.

        Call it only once pauses apply to the server.
        """
        if not member.paused:
            await self.pauses.end([member.url])

    async def _end_notes(self) -> None:
        """Forget the notes of the servers that run again. The notes of leaving servers end with their parting."""
        paused = {member.url for member in self._members if member.paused} | self._partings.keys()
        await self.pauses.end([url for url in self.pauses.held if url not in paused])

    async def _note_memory(self, released: frozenset[str]) -> None:
        if self._state.mode is not None:
            await self.pauses.begin([member.url for member in self._alive()], self._state.mode, released)

    async def _reach_all(self) -> list[ProxyError]:
        """Connect to all missing servers; return the errors of those that cannot be reached.

        The server with the newest weights joins first and sets the version. Raises ConfigurationError if one can never
        join or does not record what it has to.
        """
        urls = list(self._missing)
        results = await asyncio.gather(*map(self._reach, urls), return_exceptions=True)
        found: list[tuple[RemoteEngine, bool]] = []
        for url, result in zip(urls, results, strict=True):
            if isinstance(result, EngineIncapable):
                raise ConfigurationError(f"--engine: {result.message}")
            if isinstance(result, ProxyError):
                self._missing[url] = result.message
            elif isinstance(result, BaseException):
                raise result
            else:
                found.append(result)
        for engine, _ in found:
            if (fault := engine.info().why_unrecorded(self._replay)) is not None:
                raise ConfigurationError(f"--replay {fault[0]}: {named_failure(engine.url, fault[1])}")
        for engine, proven in sorted(found, key=lambda reached: -reached[0].info().weight_version):
            await self._join(engine, proven=proven)
        return [result for result in results if isinstance(result, ProxyError)]

    async def _reach(self, url: str) -> tuple[RemoteEngine, bool]:
        """Connect to a server and make it sample a token; return its engine, and whether it sampled the token."""
        if (parting := self._partings.get(url)) is not None:
            await asyncio.wait([parting])
        engine = await self._connect(url)
        try:
            await self._continue(engine)
            return engine, await self._prove(engine)
        except BaseException:
            await engine.close()
            raise

    async def _join(self, engine: RemoteEngine, *, proven: bool) -> None:
        """Let a missing server join. Part from it if it cannot join or has been removed."""
        member = Member(engine)
        try:
            await self._agree(member, proven=proven)
        except (EngineLost, EngineUnavailable) as error:
            if engine.url in self._missing:
                self._missing[engine.url] = error.message
        else:
            if self._missing.pop(engine.url, None) is not None:
                self._members.append(member)
                self._arrived.set()
                self._tell_alive()
                await self._end_note(member)
                return
        self.pauses.leave(engine.url)
        paused = member.paused
        await self._part(member)
        if paused and not member.paused:  # else it may be paused from an earlier time
            await self.pauses.continued(engine.url)

    async def _watch(self) -> None:
        """Check all servers periodically until cancelled, each in its own task so that a slow one delays no other."""
        while True:
            await asyncio.sleep(self._check_s)
            self._events.sweep()
            self._trust.events.sweep()
            targets: list[Member | str] = [*self._members, *self._missing]
            for target in targets:
                self._look_at(target)

    def _look_at(self, target: Member | str) -> asyncio.Task[None]:
        """Start a check of a member, or of a missing URL, unless one is running; return its task."""
        if target not in self._looks:
            self._looks[target] = task = asyncio.create_task(self._look(target))
            task.add_done_callback(lambda _: self._looks.pop(target))
        return self._looks[target]

    async def _look(self, target: Member | str) -> None:
        try:
            if isinstance(target, str):
                engine, proven = await self._reach(target)
                await self._join(engine, proven=proven)
            elif target.alive:
                await self._examine(target)
                if target.alive and self.leads and not self._state.released:
                    await self._give_adapters(target)
                await self._trust.review(target)
            else:
                await started(target.engine)
                await self._agree(target)
                self._tell_alive()
                await self._end_note(target)
        except ProxyError as error:
            if isinstance(target, Member):
                target.failure = error.message
            elif target in self._missing:
                self._missing[target] = error.message


def _sum_up(infos: Sequence[EngineInfo], alive: int, every: int) -> EngineInfo:
    """The facts that hold for all servers of `infos`."""
    shared: frozenset[Capability] = reduce(lambda one, other: one & other, (info.capabilities for info in infos))
    running = [info.max_running_requests for info in infos if info.max_running_requests is not None]
    records = frozenset.intersection(*(info.records for info in infos))
    unrecorded = {column: why for info in reversed(infos) for column, why in info.unrecorded}
    return replace(
        infos[0],
        context_length=min(info.context_length for info in infos),
        weight_version=max(info.weight_version for info in infos),
        capabilities=shared,
        max_running_requests=sum(running) if len(running) == len(infos) else None,
        detail=f"{alive} of {every} servers: {infos[0].detail}",
        records=records,
        unrecorded=tuple((column, why) for column, why in unrecorded.items() if column not in records),
        dense=all(info.dense for info in infos),
        dtype="",  # each chunk has that of its server
        quantization="",
    )
