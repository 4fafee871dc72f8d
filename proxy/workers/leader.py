"""The administration of an engine that all workers use: worker 0 leads, the others follow.

A pause first holds the gates of all workers; then the leader pauses the engine, once. The leader sends every change of
the engine to the others before requests are admitted again, so every token has the version that sampled it. All workers
keep the latest state that they received. A restarted worker, including the leader, begins with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.engine.admin import EngineAdmin
from proxy.engine.gate import Gate, Load
from proxy.engine.interface import (
    EngineInfo,
    PauseMode,
    ServerPool,
    SharedEngine,
    WeightTransfer,
)
from proxy.engine.pauses import NotedEngine
from proxy.engine.requests import Failure
from proxy.telemetry.groups import EngineMetrics
from proxy.workers.peers import Peers

LEADER = 0
"""The number of the leading worker."""

_SUMMED = frozenset({"in_flight", "served", "session_count", "prompt_tokens", "cached_tokens"})


@dataclass(frozen=True, slots=True)
class LeaderState:
    """The state that the leader sends: the pause of the gates, and its engine's `common`. Numbers are ascending."""

    number: int
    mode: PauseMode | None
    common: Mapping[str, Any]


class Gates:
    """Implements `proxy.engine.admin.GateControl` for the gates of all workers."""

    def __init__(self, gate: Gate, peers: Peers) -> None:
        self._gate, self._peers = gate, peers
        self.state = gate.state

    async def hold(self, mode: PauseMode) -> None:
        """Hold all gates."""
        self.state.announce(mode)
        own = asyncio.ensure_future(self._gate.hold(mode))
        try:
            await asyncio.gather(own, self._peers.ask_all("hold", mode))
        except BaseException:
            self.state.ending = True
            try:
                if own.cancel():  # another worker failed first: this gate must not be held later
                    await asyncio.wait([own])
            finally:
                await self.let_in()
            raise

    async def let_in(self) -> None:
        """Admit requests on all workers."""
        await asyncio.gather(self._gate.let_in(), self._peers.ask_all("let_in"))

    async def until_idle(self) -> None:
        """Wait until no worker has a request in the engine."""
        await asyncio.gather(self._gate.until_idle(), self._peers.ask_all("until_idle"))

    async def load(self) -> Load:
        """The sums over all workers."""
        loads = [await self._gate.load(), *await self._peers.ask_all("load")]
        return Load(sum(load.in_flight for load in loads), sum(load.waiting for load in loads))


class Follower:
    """Handles the state that the leader sends to every worker. `last`: the newest state, for a worker that starts."""

    def __init__(self, engine: SharedEngine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self._adopting = asyncio.Lock()
        self.last: LeaderState | None = None
        self._adopted: LeaderState | None = None

    async def adopt(self, told: LeaderState) -> None:
        """Adopt a state of the leader, or a newer state if there is one by now. Raises the errors of the engine."""
        if self.last is None or told.number > self.last.number:
            self.last = told
        async with self._adopting:  # a state may wait for a joining server, and must not undo a newer state then
            while (newest := self.last) is not None and newest is not self._adopted:
                await self._engine.adopt(newest.common)
                if self.last is newest and newest.mode is not None and self._gate.state.paused is None:
                    await self._gate.hold(newest.mode)
                self._adopted = newest

    async def catch_up(self, peers: Peers) -> None:
        """Adopt the newest state that another worker knows. Call it before the engine starts."""
        for told in await peers.ask_all("latest"):
            if told is not None:
                await self.adopt(told)

    async def latest(self) -> LeaderState | None:
        """The newest state that this worker knows; None if the leader has changed nothing yet."""
        return self.last

    async def held(self) -> bool:
        """True while a pause holds the requests of this worker."""
        return self._gate.state.held


class Leader:
    """Implements `proxy.engine.interface.EngineControl`: changes the engine, then sends its state to the others."""

    def __init__(
        self, engine: SharedEngine, gates: Gates, follower: Follower, peers: Peers, metrics: EngineMetrics
    ) -> None:
        self._engine, self._state, self._follower, self._peers = engine, gates.state, follower, peers
        self.admin = EngineAdmin(self, gates, metrics)

    async def take_over(self) -> None:
        """Lead from now on. After a restart, bring the engine and the gates to the state that the others know.

        A gate that is held without a known state belongs to a leader that died before it paused the engine.
        """
        self._engine.leads = True
        last = self._follower.last
        if last is not None or any(await self._peers.ask_all("held")):
            await self.admin.take_over(frozenset(last.common.get("released", ()) if last is not None else ()))
        elif isinstance(self._engine, NotedEngine) and (pause := self._engine.left_over) is not None:
            await self.admin.go_on(*pause)

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine once, while all gates are held."""
        loads = await self._peers.ask_all("load")
        self._engine.busy_elsewhere = any(load.in_flight for load in loads)
        await self._engine.pause(mode)
        await self._tell()

    async def resume(self) -> None:
        """Resume the engine."""
        await self._engine.resume()
        self._state.ending = True
        try:
            await self._tell()
        except BaseException:
            self._state.ending = False
            raise

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load weights, once for all workers."""
        new = await self._engine.update_weights(path, version)
        await self._tell()
        return new

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Perform one step of a weight transfer, once for all workers."""
        version = await self._engine.transfer_weights(step, fields)
        await self._tell()
        return version

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Release memory."""
        await self._engine.release_memory(tags)
        await self._tell()

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Resume released memory."""
        await self._engine.resume_memory(tags)
        await self._tell()

    async def flush_cache(self) -> None:
        """Empty the prefix cache."""
        await self._engine.flush_cache()

    def info(self) -> EngineInfo:
        """Facts about the engine."""
        return self._engine.info()

    async def latest(self) -> LeaderState | None:
        """The newest state, for a worker that starts, including a pause that is about to begin."""
        last, mode = self._follower.last, self._state.shared
        if mode is None:
            return last
        return LeaderState(0, mode, self._engine.common()) if last is None else replace(last, mode=mode)

    async def tell_servers(self) -> None:
        """Send the list of engine servers to all workers."""
        await self._tell()

    async def _tell(self) -> None:
        """Send the pause of the gates and the state of the engine to all workers.

        A pause that ends with the current operation is not sent, since it would stay in force if the leader died.
        Raises EngineIncapable if a worker cannot adopt the state.
        """
        number = 1 if self._follower.last is None else self._follower.last.number + 1
        told = self._follower.last = LeaderState(number, self._state.lasting, self._engine.common())
        await self._peers.ask_all("adopt", told)


async def show_servers(pool: ServerPool, peers: Peers) -> list[dict[str, Any]]:
    """The servers of a pool as this worker sees them, with the summed numbers of all workers."""
    shown = {server["url"]: dict(server) for server in await pool.show()}
    for servers in await peers.ask_all("show_servers"):
        for server in servers:
            for name in _SUMMED & shown.get(server["url"], {}).keys() & server.keys():
                shown[server["url"]][name] += server[name]
    return list(shown.values())


class CommonPool:
    """Implements `proxy.engine.interface.ServerPool` for the pools of all workers."""

    def __init__(self, pool: ServerPool, leader: Leader, peers: Peers) -> None:
        self._pool, self._leader, self._peers = pool, leader, peers

    @property
    def alive(self) -> bool:
        """True while a server takes requests of this worker."""
        return self._pool.alive

    def check_alive(self) -> None:
        """Raise EngineUnavailable unless a server takes requests of this worker."""
        self._pool.check_alive()

    async def until_alive(self) -> None:
        """Wait until a server takes requests of this worker."""
        await self._pool.until_alive()

    def has_other(self, failures: Sequence[Failure]) -> bool:
        """True if a server that is not named in `failures` takes requests of this worker."""
        return self._pool.has_other(failures)

    def note_resubmission(self, failure: Failure) -> None:
        """The same as `Pool.note_resubmission`."""
        self._pool.note_resubmission(failure)

    async def show(self) -> list[dict[str, Any]]:
        """The servers as this worker sees them, with the summed numbers of all workers."""
        return await show_servers(self._pool, self._peers)

    async def add(self, url: str) -> None:
        """Add a server to the pools of all workers."""
        await self._pool.add(url)
        await self._leader.tell_servers()

    async def remove(self, url: str) -> None:
        """Remove a server from the pools of all workers."""
        await self._pool.remove(url)
        await self._leader.tell_servers()
