"""The LoRA adapters of one route: how they are published, which one a turn begins with, and when one is unloaded.

A version is *live* from its publication until it is unloaded: requests may name it. A session stays at the version that
its first turn on the route began with, or follows the newest one; a version that a turn has named stays live until the
session ends. A version is in use while a session is pinned to it or a request runs on it. Unused versions except for
the newest are unloaded.

The engine never has more than `--max-live-versions` adapters and one that is being published. While there is no room, a
publication waits; turns never wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proxy.engine.interface import AdapterEngine, AdapterSource, Capability, Engine
from proxy.engine.versions import LARGEST_VERSION
from proxy.settings import Settings
from tokengrove.errors import (
    SHUTTING_DOWN,
    EngineIncapable,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
)
from tokengrove.options.start import AdapterPinning

logger = logging.getLogger(__name__)

BASE = 0
"""The version of a session whose first turn the base model sampled; adapters have larger ones."""

_RETRY_AFTER_S = 5.0
_SHOWN = 8
"""The number of sessions that a message names."""


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter in the engine, or on its way to it.

    `chosen`: the trainer chose its version. `loading`: the task that loads it. `sessions`: those pinned to it.
    `running`: the number of requests. `failure`: why it could not be unloaded.
    """

    version: int
    source: AdapterSource
    chosen: bool
    loading: asyncio.Task[None] | None = None
    published_at: float = 0.0
    sessions: dict[str, None] = field(default_factory=dict)
    running: int = 0
    failure: Exception | None = None

    @property
    def used(self) -> bool:
        return bool(self.sessions or self.running)


@dataclass(slots=True, eq=False)
class _Session:
    """The versions of a session. `own`: the one that it stays at; None while it follows. `pins`: all that it keeps.

    `recorded`: `own` is of a turn from before the server started.
    """

    own: int | None = None
    recorded: bool = False
    pins: set[int] = field(default_factory=set)


class Adapters:
    """The adapters of one route, on one event loop. `newest`: the version that new sessions begin with; None: none yet.
    `possible`: the engine is of a kind that may load some.

    Turns call `begin` where they start, in one step with their other checks, and `end` when they have ended, however
    that was. `forget` is called at the end of a session, and `close` at shutdown, before the engine is closed.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        release: Callable[[AdapterSource], None] = lambda _: None,
        *,
        route: str = "",
        lora: bool = False,
    ) -> None:
        """`release` is called with each published source that is no longer used. `lora`: without an adapter, the route
        refuses turns instead of using the base model."""
        self.route = route
        self.possible = isinstance(engine, AdapterEngine)
        self.newest: int | None = None
        self._engine, self._settings, self._release, self._lora = engine, settings, release, lora
        self._live: dict[int, _Adapter] = {}
        self._leaving: dict[int, _Adapter] = {}
        self._arriving: _Adapter | None = None
        self._sessions: dict[str, _Session] = {}
        self._publishing = asyncio.Lock()
        self._in_engine = asyncio.Lock()
        self._changed = asyncio.Event()
        self._cleaner: asyncio.Task[None] | None = None
        self._waits = False
        self._closed = False

    @property
    def version(self) -> int:
        """The version that a new session's tokens have: the newest adapter's, else that of the engine's weights."""
        return self._engine.info().weight_version if self.newest is None else self.newest

    # Turns ---------------------------------------------------------------------------------------------------------

    def version_for(
        self,
        session_id: str | None,
        *,
        pinned: int | None = None,
        policy: AdapterPinning = AdapterPinning.SESSION,
        recorded: int | None = None,
    ) -> int | None:
        """The version that a turn begins with; None: the base model.

        `pinned`: the version that the request names, as in `policy@7`. `recorded`: the version that the session's first
        stored turn on this route began with, BASE if it was the base model, None if there is none; it counts after a
        restart of the server. `session_id` None: a request outside of sessions.

        Raises NotFound if the version is not live: no other one takes its place. Raises EngineUnavailable if the route
        serves adapters only and has none yet.
        """
        if pinned is not None:
            return self._live_one(pinned, f"'model' names version {pinned}")
        known = None if session_id is None else self._sessions.get(session_id)
        own = recorded if known is None or known.own is None else known.own
        if policy == AdapterPinning.FOLLOW or own is None:
            if self.newest is None and recorded:
                raise EngineUnavailable(
                    f"this session was sampled by adapters, and {self._name} has none since it started; publish one",
                    retry_after_s=_RETRY_AFTER_S,
                )
            return self.newest if self.newest is not None or not self._lora else self._newest_or_base()
        if own == BASE and not self._lora:
            return None
        told = f"this session began with version {own}, and stays at it"
        version = self._live_one(own, told)
        if (known is None or known.recorded) and not self._live[version].chosen:
            raise NotFound(
                f"{told}; this server has numbered another adapter {own} since it started: publish adapters with "
                "'version', or start a new session",
                param="model",
            )
        return version

    def knows(self, session_id: str) -> bool:
        """Whether a session has begun a turn since the server started."""
        return session_id in self._sessions

    def begin(
        self,
        session_id: str | None,
        *,
        pinned: int | None = None,
        policy: AdapterPinning = AdapterPinning.SESSION,
        recorded: int | None = None,
    ) -> int | None:
        """Count a request that starts, and return its version, which stays live until `end`.

        Pins the session to the version, unless it follows and names none. Takes the arguments and raises the errors of
        `version_for`.
        """
        version = self.version_for(session_id, pinned=pinned, policy=policy, recorded=recorded)
        if version is not None:
            self._live[version].running += 1
        if session_id is not None:
            session = self._sessions.setdefault(session_id, _Session())
            if pinned is None and policy == AdapterPinning.FOLLOW:
                return version
            if policy is AdapterPinning.SESSION and session.own is None:
                session.recorded = recorded is not None
                session.own = (version or BASE) if recorded is None else recorded
            for each in (version, session.own):
                if each is not None and each in self._live and each not in session.pins:
                    session.pins.add(each)
                    self._live[each].sessions[session_id] = None
        return version

    def end(self, version: int | None) -> None:
        """Stop counting a request. `version`: what its `begin` returned."""
        if version is not None:
            self._live[version].running -= 1
            self._drop_unused()

    def forget(self, session_id: str) -> None:
        """Unpin a session that has ended. Unknown ids are ignored."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.pins:
            for version in session.pins:
                del self._live[version].sessions[session_id]
            self._drop_unused()

    # Trainers ------------------------------------------------------------------------------------------------------

    async def publish(self, source: AdapterSource, version: int | None = None) -> int:
        """Load an adapter and make it the newest version; return the version. One publication runs at a time.

        `version`: larger than all earlier ones; None: one more than the newest. Publishing the newest again, with an
        equal source, has no effect. Waits for room first. If it fails or is cancelled, nothing is published. Raises
        InvalidRequest for the version or an adapter that does not fit the model, EngineIncapable if the engine has no
        adapters, EngineUnavailable, EngineFailed, and the error of an earlier adapter that could not be unloaded and
        leaves no room.
        """
        try:
            self._check_capable()
            async with self._publishing:
                if version is not None and version == self.newest and _equal(self._live[version].source, source):
                    if source.tensors is None:  # the engine compares the files, which may have changed
                        async with self._in_engine:
                            await self._adapting().load_adapter(version, self._live[version].source)
                    return version
                return await self._publish(_Adapter(self._next(version), source, chosen=version is not None))
        finally:
            self._release_unused(source)

    async def withdraw(self, version: int) -> None:
        """Unload a version that could not be unloaded before. Raises its error if it still cannot be.

        Raises NotFound for a version that is not live, and InvalidRequest for one that is in use or the newest.
        """
        if version == self.newest:
            raise InvalidRequest(
                f"version {version} is the newest, so turns begin with it; publish another one first", param="version"
            )
        if version in self._live:
            raise InvalidRequest(
                f"version {version} is in use by {self._users([self._live[version]])}; it is unloaded after their end",
                param="version",
            )
        if (adapter := self._leaving.get(version)) is None:
            raise self._not_live(f"version {version} cannot be withdrawn", param="version")
        await asyncio.shield(self._clean())
        if adapter.failure is not None:
            raise adapter.failure

    @property
    def unused(self) -> bool:
        """True if no adapter was published, and none is being published."""
        return self.newest is None and self._arriving is None

    def check_weights(self) -> None:
        """Raise InvalidRequest if the weights of the base model must not change."""
        if not self.unused:
            raise InvalidRequest(
                f"{self._name} serves adapters, and its versions count them, so the weights of the base model cannot "
                "change; publish an adapter with POST /engine/adapters, or restart the server"
            )

    def show(self) -> dict[str, Any]:
        """The newest version, the live ones, and what a publication waits for, as JSON."""
        live = [
            {
                "version": adapter.version,
                "path": adapter.source.path,
                "published_at": adapter.published_at,
                "sessions": len(adapter.sessions),
                "running": adapter.running,
            }
            for adapter in self._live.values()
        ]
        return {"newest": self.newest, "live": live, "waiting_for": self._waiting_for()}

    async def close(self) -> None:
        """Refuse publications, also those that wait, and release all sources. The adapters stay in the engine."""
        self._closed = True
        self._changed.set()
        adapters = [*self._live.values(), *self._leaving.values(), *([self._arriving] if self._arriving else [])]
        tasks = [task for task in (self._cleaner, *(each.loading for each in adapters)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for adapter in adapters:
            self._release(adapter.source)

    # Publication ---------------------------------------------------------------------------------------------------

    async def _publish(self, adapter: _Adapter) -> int:
        self._arriving, began = adapter, time.monotonic()
        try:
            await self._until(lambda: self._has_room and self._has_place(adapter.version), adapter)
            waited = time.monotonic()
            await self._loaded(adapter)
            loaded = time.monotonic()
            await self._until(lambda: self._has_room, adapter)  # sessions may have begun with the newest meanwhile
            if adapter.version <= self._base():
                raise InvalidRequest(
                    f"the engine's weights have become version {self._base()} meanwhile; publish a larger version",
                    param="version",
                )
        except BaseException:
            self._abandon(adapter)
            raise
        finally:
            self._arriving = None
        adapter.published_at, self.newest = time.time(), adapter.version
        self._live[adapter.version] = adapter
        self._drop_unused()
        fields = {
            "route": self.route or None,
            "version": adapter.version,
            "path": adapter.source.path,
            "live": len(self._live),
            "waited_s": round(waited - began + time.monotonic() - loaded, 3),
            "seconds": round(loaded - waited, 3),
        }
        logger.info("adapter published", fields)
        return adapter.version

    async def _loaded(self, adapter: _Adapter) -> None:
        """Load an adapter. If this is cancelled, the engine finishes: it is told to unload only what it has loaded."""
        adapter.loading = asyncio.create_task(self._load(adapter))
        try:
            await asyncio.shield(adapter.loading)
        except asyncio.CancelledError:
            if adapter.loading.cancelled():
                raise EngineUnavailable(SHUTTING_DOWN) from None
            raise

    async def _load(self, adapter: _Adapter) -> None:
        async with self._in_engine:
            await self._adapting().load_adapter(adapter.version, adapter.source)

    def _adapting(self) -> AdapterEngine:
        assert isinstance(self._engine, AdapterEngine)
        return self._engine

    def _abandon(self, adapter: _Adapter) -> None:
        """Unload an adapter that is not published after all. If it is still being loaded, do it afterwards."""
        loading = adapter.loading
        if loading is not None and (not loading.done() or not (loading.cancelled() or loading.exception())):
            self._leaving[adapter.version] = adapter
            if not self._closed:
                self._clean()

    @property
    def _has_room(self) -> bool:
        """Whether another version may be live beside those in use. An unused newest one gives way to it."""
        return sum(adapter.used for adapter in self._live.values()) < self._settings.max_live_versions

    def _has_place(self, version: int) -> bool:
        """Whether the engine may load another adapter, under this version."""
        loaded = len(self._live) + len(self._leaving)
        return loaded <= self._settings.max_live_versions and version not in self._leaving

    async def _until(self, condition: Callable[[], bool], adapter: _Adapter) -> None:
        """Wait until `condition` holds.

        Raises EngineUnavailable at shutdown, and the error of an unload that has failed if nothing else is missing.
        """
        told = False
        if self._leaving:
            self._clean()
        while True:
            self._changed.clear()
            if self._closed:
                raise EngineUnavailable(SHUTTING_DOWN)
            if condition():
                self._waits = False
                return
            failures = [each.failure for each in self._leaving.values() if each.failure is not None]
            if self._has_room and failures and (self._cleaner is None or self._cleaner.done()):
                raise failures[0]
            self._waits = not self._has_room
            if self._waits and not told:
                told = True
                used = [each for each in self._live.values() if each.used]
                logger.warning(
                    "publication waits",
                    {
                        "route": self.route or None,
                        "version": adapter.version,
                        "live": len(self._live),
                        "waits_for": self._users(used),
                    },
                )
            try:
                await self._changed.wait()
            finally:
                self._waits = False

    def _next(self, version: int | None) -> int:
        newest = self.version
        if version is None:
            version = newest + 1
        if version <= newest:
            what = "the weights of the engine have" if self.newest is None else "the newest adapter has"
            raise InvalidRequest(
                f"'version' is {version}, but {what} version {newest}; publish a larger one", param="version"
            )
        if version > LARGEST_VERSION:
            raise InvalidRequest(f"'version' must be at most {LARGEST_VERSION}", param="version")
        return version

    def _check_capable(self) -> None:
        if self._closed:
            raise EngineUnavailable(SHUTTING_DOWN)
        if self._settings.workers > 1:
            raise EngineIncapable("adapters are known to one process only; start the server without --workers")
        info = self._engine.info()
        if not isinstance(self._engine, AdapterEngine) or Capability.ADAPTERS not in info.capabilities:
            raise EngineIncapable(
                f"the engine {info.name!r} loads no LoRA adapters; docs/models.md#adapters says which engines do, and "
                "how they are started"
            )

    # Unloading -----------------------------------------------------------------------------------------------------

    def _drop_unused(self) -> None:
        """Take leave of the unused versions, except for the newest."""
        unused = [each for each in self._live.values() if not each.used and each.version != self.newest]
        for adapter in unused:
            self._leaving[adapter.version] = self._live.pop(adapter.version)
        self._changed.set()
        if unused and not self._closed:
            self._clean()

    def _clean(self) -> asyncio.Task[None]:
        """Unload the versions that are leaving. One task at a time does so, and tries each version once."""
        if self._cleaner is None or self._cleaner.done():
            self._cleaner = asyncio.create_task(self._unload_leaving())
        return self._cleaner

    async def _unload_leaving(self) -> None:
        tried: set[_Adapter] = set()
        while rest := [adapter for adapter in self._leaving.values() if adapter not in tried]:
            tried.add(rest[0])
            await self._unload(rest[0])
        # `_until` looks again once this task is done.
        asyncio.get_running_loop().call_soon(self._changed.set)

    async def _unload(self, adapter: _Adapter) -> None:
        adapter.failure, loading = None, adapter.loading
        if loading is not None and not loading.done():
            await asyncio.wait([loading])
        try:
            if loading is None or not (loading.cancelled() or loading.exception()):
                async with self._in_engine:
                    await self._adapting().unload_adapter(adapter.version)
        except Exception as error:
            adapter.failure = error
            fields = {"route": self.route or None, "version": adapter.version, "reason": str(error)}
            logger.warning("adapter not unloaded", fields)
            return
        del self._leaving[adapter.version]
        self._release(adapter.source)
        self._changed.set()
        logger.info("adapter unloaded", {"route": self.route or None, "version": adapter.version})

    def _release_unused(self, source: AdapterSource) -> None:
        """Release a source that was not published, unless an adapter in the engine has the same folder."""
        kept = (*self._live.values(), *self._leaving.values())
        if not any(adapter.source.path == source.path for adapter in kept):
            self._release(source)

    # Words ---------------------------------------------------------------------------------------------------------

    def _base(self) -> int:
        return self._engine.info().weight_version

    @property
    def _name(self) -> str:
        return f"the model {self.route!r}" if self.route else "this server"

    def _newest_or_base(self) -> int | None:
        if self.newest is None and self._lora:
            raise EngineUnavailable(
                f"{self._name} serves adapters only, and none was published yet; publish one with "
                "POST /engine/adapters, and try again",
                retry_after_s=_RETRY_AFTER_S,
            )
        return self.newest

    def _live_one(self, version: int, what: str) -> int:
        if version not in self._live:
            raise self._not_live(what, param="model")
        return version

    def _not_live(self, what: str, *, param: str) -> NotFound:
        live = ", ".join(map(str, self._live)) or "none"
        return NotFound(f"{what}, which is not live; live versions of {self._name}: {live}", param=param)

    def _waiting_for(self) -> dict[str, Any] | None:
        if not self._waits or self._arriving is None:
            return None
        used = [adapter for adapter in self._live.values() if adapter.used]
        sessions = _sessions_of(used)
        return {
            "version": self._arriving.version,
            "sessions": sessions[:_SHOWN],
            "count": len(sessions),
            "requests": sum(adapter.running for adapter in used),
        }

    def _users(self, adapters: list[_Adapter]) -> str:
        """Who uses these versions, in words."""
        sessions, running = _sessions_of(adapters), sum(adapter.running for adapter in adapters)
        named = ", ".join(sessions[:_SHOWN]) + (", ..." if len(sessions) > _SHOWN else "")
        told = [f"{len(sessions)} sessions ({named})"] if sessions else []
        return " and ".join([*told, *([f"{running} requests"] if running else [])])


def _sessions_of(adapters: list[_Adapter]) -> list[str]:
    """The sessions pinned to any of these versions, each once, the oldest version's first."""
    return list(dict.fromkeys(session for adapter in adapters for session in adapter.sessions))


def _equal(one: AdapterSource, other: AdapterSource) -> bool:
    """Whether two sources are of one adapter. Each upload has a folder of its own."""
    if one.tensors is None and other.tensors is None:
        return one.path == other.path
    return one.tensors == other.tensors and one.config == other.config
