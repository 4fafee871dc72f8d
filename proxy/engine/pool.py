"""Many engine servers as one engine: sticky by session, else the one with the fewest requests in flight.

A server that dies is out at once, and in again when it answers with the weights of the others; what it was sampling is
raised as EngineLost, for the gate to send on. Servers come and go at run time. All that are in serve the same weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

from proxy.engine.base import Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.remote import RemoteEngine
from proxy.errors import ConfigurationError, EngineFailed, EngineLost, EngineUnavailable, InvalidRequest, ProxyError
from proxy.types import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)

_REMEMBERED_SESSIONS = 65_536
_CHECK_S = 1.0
"""How long a death may stay unseen where nothing is in flight, and a return where something waits for it."""

_RETRY_AFTER_S = 5.0


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool. `leaving`: it takes no more requests and goes when the last one has ended.

    `paused`: it was told to pause, and not yet to go on, whatever became of it meanwhile.
    """

    engine: RemoteEngine
    alive: bool = False
    paused: bool = False
    leaving: bool = False
    in_flight: int = 0
    served: int = 0
    failure: str = ""

    @property
    def url(self) -> str:
        return self.engine.url


@dataclass(slots=True)
class _State:
    """What a server that joins must be brought to."""

    mode: PauseMode | None = None
    weights: tuple[str, int] | None = None
    version: int = 0


class Pool:
    """Implements `proxy.engine.base.Engine` over `connect(url)` for each URL."""

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str], Awaitable[RemoteEngine]],
        *,
        start_timeout_s: float,
        check_s: float = _CHECK_S,
    ) -> None:
        """`connect` finds out what kind of server there is and starts it. Raises ConfigurationError without URLs."""
        if not urls:
            raise ConfigurationError("--engine names no server")
        self._urls = list(dict.fromkeys(urls))
        self._connect = connect
        self._start_timeout_s = start_timeout_s
        self._check_s = check_s
        self._members: list[Member] = []
        self._missing: dict[str, str] = {}
        self._of_session: OrderedDict[str, Member] = OrderedDict()
        self._state = _State()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until a server answers. Raises ConfigurationError when none does in time."""
        self._missing = dict.fromkeys(self._urls, "not reached yet")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_timeout_s
        while True:
            await self._look_for_missing()
            if self._members:
                break
            if loop.time() > deadline:
                reasons = "; ".join(f"{url}: {why}" for url, why in self._missing.items())
                raise ConfigurationError(f"--engine: no server answers: {reasons}")
            await asyncio.sleep(self._check_s)
        self._state.version = max(member.engine.info().weight_version for member in self._members)
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample a continuation. Raises EngineLost when the server dies, EngineUnavailable when none is alive."""
        member = self._choose(request.session_id)
        member.in_flight += 1
        member.served += 1
        try:
            async with aclosing(cast("Any", member.engine.generate(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineLost:
            await self._suspect(member)
            raise
        finally:
            member.in_flight -= 1
            if member.leaving and not member.in_flight:
                await self._drop(member)

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is."""
        await asyncio.gather(*(member.engine.abort(request_id) for member in self._alive()))

    async def pause(self, mode: PauseMode) -> None:
        """Park generation on every server."""
        self._state.mode = mode
        for member in self._alive():
            member.paused = True
        try:
            await self._on_all(lambda engine: engine.pause(mode))
        except ProxyError:
            self._state.mode = None
            raise

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._state.mode = None
        await self._on_all(lambda engine: engine.resume())
        for member in self._alive():
            member.paused = False

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load the same weights on every server. One that cannot is out until it can."""
        new = self._state.version + 1 if version is None else version
        await self._on_all(lambda engine: engine.update_weights(path, new))
        self._state.weights, self._state.version = (path, new), new
        return new

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step on to every server; in INIT_GROUP their `rank_offset`s follow each other, in the order given."""
        offset = 0
        bodies: dict[str, Mapping[str, Any]] = {}
        for member in self._alive():
            shifted = {"rank_offset": fields["rank_offset"] + offset} if "rank_offset" in fields else {}
            bodies[member.url] = {**fields, **shifted}
            offset += int(getattr(member.engine, "world_size", 1))
        versions = await self._on_all(lambda engine: engine.transfer_weights(step, bodies[engine.url]))
        if fields.get("weight_version") is not None:
            self._state.weights, self._state.version = None, max(versions)
        return self._state.version

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Give memory back on every server."""
        await self._on_all(lambda engine: engine.release_memory(tags))

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Take it again."""
        await self._on_all(lambda engine: engine.resume_memory(tags))

    async def flush_cache(self) -> None:
        """Forget cached prefixes on every server."""
        await self._on_all(lambda engine: engine.flush_cache())

    def info(self) -> EngineInfo:
        """What all servers can do; the shortest context."""
        infos = [member.engine.info() for member in self._members]
        if not infos:
            raise EngineUnavailable("the pool has no server", retry_after_s=_RETRY_AFTER_S)
        shared: frozenset[Capability] = reduce(lambda one, other: one & other, (i.capabilities for i in infos))
        return replace(
            infos[0],
            context_length=min(info.context_length for info in infos),
            weight_version=max(info.weight_version for info in infos),
            capabilities=shared,
            detail=f"{len(self._alive())} of {len(infos) + len(self._missing)} servers: {infos[0].detail}",
        )

    async def close(self) -> None:
        """Close the connections; the servers stay."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    def servers(self) -> list[dict[str, Any]]:
        """Each server as a dict: url, state, in_flight, served, sessions, weight_version, failure."""
        sessions: dict[int, int] = {}
        for member in self._of_session.values():
            sessions[id(member)] = sessions.get(id(member), 0) + 1
        shown = [
            {
                "url": member.url,
                "state": "leaving" if member.leaving else "alive" if member.alive else "ejected",
                "in_flight": member.in_flight,
                "served": member.served,
                "sessions": sessions.get(id(member), 0),
                "weight_version": member.engine.info().weight_version,
                "failure": member.failure or None,
            }
            for member in self._members
        ]
        return shown + [{"url": url, "state": "missing", "failure": why} for url, why in self._missing.items()]

    async def add(self, url: str) -> None:
        """Take a server in. Raises InvalidRequest when it is there already or does not answer."""
        url = url.rstrip("/")
        if any(member.url == url and not member.leaving for member in self._members) or url in self._missing:
            raise InvalidRequest(f"{url} is in the pool already", param="url")
        try:
            await self._join(url)
        except (EngineLost, EngineUnavailable) as error:
            raise InvalidRequest(f"{url} cannot join: {error.message}", param="url") from None

    async def remove(self, url: str) -> None:
        """Send a server no more requests; those in flight end. Raises InvalidRequest for one that is not here."""
        url = url.rstrip("/")
        if self._missing.pop(url, None) is not None:
            return
        found = [member for member in self._members if member.url == url and not member.leaving]
        if not found:
            raise InvalidRequest(f"{url} is not in the pool", param="url")
        found[0].leaving = True
        if not found[0].in_flight:
            await self._drop(found[0])

    def _alive(self) -> list[Member]:
        return [member for member in self._members if member.alive and not member.leaving]

    def _choose(self, session_id: str) -> Member:
        alive = self._alive()
        if not alive:
            why = "; ".join(f"{m.url}: {m.failure}" for m in self._members if m.failure) or "the pool is empty"
            raise EngineUnavailable(f"no engine server is alive ({why})", retry_after_s=_RETRY_AFTER_S)
        member = self._of_session.get(session_id) if session_id else None
        if member is None or member not in alive:
            member = min(alive, key=lambda m: (m.in_flight, m.served))
        if session_id:
            self._of_session[session_id] = member
            self._of_session.move_to_end(session_id)
            if len(self._of_session) > _REMEMBERED_SESSIONS:
                self._of_session.popitem(last=False)
        return member

    async def _on_all(self, work: Callable[[RemoteEngine], Awaitable[Any]]) -> list[Any]:
        """Do it on every server that is alive. One that fails while others succeed is out until it agrees with them.

        Raises the first error when all fail.
        """
        members = self._alive()
        if not members:
            raise EngineUnavailable("no engine server is alive", retry_after_s=_RETRY_AFTER_S)
        results = await asyncio.gather(*(work(member.engine) for member in members), return_exceptions=True)
        failures = [(m, r) for m, r in zip(members, results, strict=True) if isinstance(r, BaseException)]
        if len(failures) == len(members):
            raise failures[0][1]
        for member, error in failures:
            if not isinstance(error, ProxyError):
                raise error
            self._eject(member, error.message)
        return [result for result in results if not isinstance(result, BaseException)]

    async def _suspect(self, member: Member) -> None:
        """A connection broke: the server is out unless it answers."""
        try:
            await member.engine.check()
        except (EngineLost, EngineUnavailable) as error:
            self._eject(member, error.message)

    def _eject(self, member: Member, why: str) -> None:
        if member.alive:
            logger.warning("engine server %s is out: %s", member.url, why)
        member.alive, member.failure = False, why

    async def _join(self, url: str) -> None:
        """Connect, bring it to the weights and the pause of the others, and take it in."""
        member = Member(await self._connect(url))
        await self._agree(member)
        if any(other.url == url for other in self._members):
            await member.engine.close()
            raise InvalidRequest(f"{url} is in the pool already", param="url")
        self._members.append(member)

    async def _agree(self, member: Member) -> None:
        """Bring a server to the state of the pool, and let it in. Raises EngineLost or EngineUnavailable."""
        version, state = await member.engine.check(), self._state
        if self._members and version != state.version:
            if state.weights is None:
                raise EngineUnavailable(f"{member.url} serves weight version {version}, the others {state.version}")
            try:
                await member.engine.update_weights(*state.weights)
            except (InvalidRequest, EngineFailed) as error:
                raise EngineUnavailable(error.message) from None
        if state.mode is not None:
            await member.engine.pause(state.mode)
            member.paused = True
        elif member.paused:
            await member.engine.resume()
            member.paused = False
        member.alive, member.failure = True, ""
        logger.info("engine server %s is in", member.url)

    async def _drop(self, member: Member) -> None:
        if member in self._members:
            self._members.remove(member)
            for session_id in [name for name, other in self._of_session.items() if other is member]:
                del self._of_session[session_id]
            await member.engine.close()

    async def _look_for_missing(self) -> None:
        for url in list(self._missing):
            try:
                await self._join(url)
            except (EngineLost, EngineUnavailable) as error:
                self._missing[url] = error.message
            else:
                self._missing.pop(url, None)

    async def _watch(self) -> None:
        """Notice deaths and returns, until cancelled."""
        while True:
            await asyncio.sleep(self._check_s)
            await self._look_for_missing()
            await asyncio.gather(*(self._look_at(member) for member in list(self._members)))

    async def _look_at(self, member: Member) -> None:
        try:
            if member.alive:
                await member.engine.check()
            else:
                await self._agree(member)
        except (EngineLost, EngineUnavailable) as error:
            self._eject(member, error.message)
