"""The LoRA adapters that every server of a pool has.

A load is published once every server that is alive has the adapter: one that refuses it undoes the load everywhere, and
one that is lost meanwhile is ejected. A server that joins or returns gets all published adapters before its first
request; so does a server that has lost some.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from proxy.engine.adapter_names import adapter_digest, adapter_name, is_named_by
from proxy.engine.interface import AdapterSource
from proxy.engine.servers.events import ServerEvents
from proxy.engine.servers.placement import RETRY_AFTER_S, Member
from proxy.engine.servers.remote import RemoteEngine
from tokengrove.errors import (
    EngineBusy,
    EngineIncapable,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
)


class LiveAdapter(NamedTuple):
    """A published adapter: its version, its name on the servers, and its folder as they see it."""

    version: int
    name: str
    path: str


class PoolAdapters:
    """The adapters of a pool. `alive` returns the servers that must have them; `eject` ejects a server for a reason.

    `events`: the log. `revision` changes whenever an adapter is published or unloaded.
    """

    def __init__(
        self, alive: Callable[[], Sequence[Member]], eject: Callable[[Member, str], None], events: ServerEvents
    ) -> None:
        self._alive, self._eject, self._events = alive, eject, events
        self._live: dict[int, LiveAdapter] = {}
        self._left: dict[str, set[str]] = {}
        self._changing = asyncio.Lock()
        self._giving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.revision = 0

    def name_of(self, version: int) -> str:
        """The name of a published adapter on the servers. Raises EngineUnavailable for other versions."""
        if (live := self._live.get(version)) is None:
            raise EngineUnavailable(
                f"adapter version {version} is not loaded on the engine servers", retry_after_s=RETRY_AFTER_S
            )
        return live.name

    async def load(self, version: int, source: AdapterSource) -> None:
        """Load an adapter on all servers, or on none. Raises like `AdapterEngine.load_adapter`."""
        async with self._changing:
            digest = await asyncio.to_thread(adapter_digest, source.path)
            if (live := self._live.get(version)) is not None:
                if live.path == source.path and is_named_by(live.name, digest):
                    return
                raise InvalidRequest(
                    f"adapter version {version} is loaded with other contents, from {live.path}; give the new adapter "
                    "another version",
                    param="version",
                )
            if reasons := [why for member in self._alive() if (why := member.engine.adapterless)]:
                raise EngineIncapable("; ".join(reasons))
            adapter = LiveAdapter(version, adapter_name(version, digest), source.path)
            asked: set[Member] = set()
            try:
                while missing := [member for member in self._alive() if member not in asked]:
                    asked.update(missing)
                    await self._load_on(missing, adapter.name, source)
                if not self._alive():
                    raise EngineUnavailable("no engine server is available", retry_after_s=RETRY_AFTER_S)
            except BaseException:
                await self._withdraw(adapter.name, asked)
                raise
            self._live[version] = adapter
            for left in self._left.values():
                left.discard(adapter.name)
            self.revision += 1

    async def unload(self, version: int) -> None:
        """Unload an adapter on all servers. A server that is lost unloads it when it returns."""
        async with self._changing:
            if (live := self._live.pop(version, None)) is not None:
                self.revision += 1
                await self._withdraw(live.name, self._alive())

    async def give(self, engine: RemoteEngine) -> int:
        """Load the published adapters that a server lacks; return the revision that it then has.

        Raises EngineLost, or EngineUnavailable if the server does not take them.
        """
        async with self._giving[engine.url]:
            revision, live = self.revision, list(self._live.values())
            left = self._left.get(engine.url, set()) - {adapter.name for adapter in live}
            if not live and not left:
                return revision
            if live and engine.adapterless:
                raise EngineUnavailable(engine.adapterless)
            names = await engine.adapters()
            lacking = [adapter for adapter in live if adapter.name not in names]
            for adapter in lacking:
                await self._load_again(engine, adapter)
            if lacking:
                versions = ",".join(str(adapter.version) for adapter in lacking)
                self._events.info("engine server gets adapters that it lacks", engine.url, versions=versions)
            for name in left & names:
                await engine.unload_adapter(name)
            self._left.get(engine.url, set()).difference_update(left)
            return revision

    async def _load_on(self, members: Sequence[Member], name: str, source: AdapterSource) -> None:
        """Load an adapter on servers. Ejects those that are lost; raises the first error of the others."""
        results = await asyncio.gather(
            *(member.engine.load_adapter(name, source) for member in members), return_exceptions=True
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineLost) and not isinstance(result, EngineBusy):
                self._eject(member, result.message)
            elif isinstance(result, BaseException):
                raise result

    async def _load_again(self, engine: RemoteEngine, adapter: LiveAdapter) -> None:
        if not is_named_by(adapter.name, await asyncio.to_thread(adapter_digest, adapter.path)):
            raise EngineUnavailable(
                f"the folder of adapter version {adapter.version}, {adapter.path}, has changed since the version was "
                "published; restore it, or publish another version"
            )
        try:
            await engine.load_adapter(adapter.name, AdapterSource(adapter.path))
        except EngineLost:
            raise
        except ProxyError as error:
            if self._live.get(adapter.version) is not adapter:  # it was unloaded meanwhile, and its folder removed
                return
            raise EngineUnavailable(
                f"the server does not load adapter version {adapter.version}, which the others have: {error.message}"
            ) from None
        if self._live.get(adapter.version) is not adapter:  # it was unloaded meanwhile
            await engine.unload_adapter(adapter.name)

    async def _withdraw(self, name: str, members: Collection[Member]) -> None:
        """Unload an adapter on servers. Those that do not answer unload it when they return."""
        found = list(members)
        results = await asyncio.gather(*(m.engine.unload_adapter(name) for m in found), return_exceptions=True)
        for member, result in zip(found, results, strict=True):
            if isinstance(result, ProxyError):
                self._left.setdefault(member.url, set()).add(name)
            elif isinstance(result, BaseException):
                raise result
