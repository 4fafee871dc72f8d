"""A pool of engine servers that die, hang, fail, are cut off, leave and join, across pauses, weights and adapters."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

from proxy.engine.callbacks import generated
from proxy.engine.chunks import TakeChunk, TokenChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.interface import AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.breaker import Breaker
from proxy.engine.servers.events import ServerEvents
from proxy.engine.servers.joining import PoolState
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.remote import AdapterLost
from proxy.types import ids_of
from tests.engines.gates import AdminGate
from tests.engines.scripts import VOCABULARY, following
from tests.torture.runs import World, scenario
from tests.unit.proxy.engine.gated import asking, uninterrupted
from tokengrove.errors import EngineFailed, EngineLost, EngineTimeout, InvalidRequest, ProxyError
from tokengrove.reasons import FinishReason

_T = TypeVar("_T")
_TIMEOUT_S, _CHECK_S = 30.0, 0.2
_TICK_S, _LONG_TICK_S = 0.01, 0.1


class _Server:
    """An engine server, whoever is connected to it. `sick`: it answers looks, but `fails` or `hangs` at requests."""

    def __init__(self, world: World, url: str) -> None:
        self.world, self.url = world, url
        self.lives = self.aborts = self.running = self.loading = 0
        self.up = self.reachable = True
        self.sick, self.was = "", set[str]()
        self.trespassers: list[str] = []
        self.version, self.mode, self.booted = 0, None, world.loop.time()
        self.mode: PauseMode | None
        self.adapters: dict[str, int] = {}

    @property
    def answers(self) -> bool:
        return self.up and self.reachable

    def die(self) -> None:
        """Lose everything that it has."""
        self.up, self.lives, self.loading = False, self.lives + 1, 0
        self.adapters.clear()

    def rise(self) -> None:
        """Start with the first weights."""
        self.up, self.version, self.mode, self.sick = True, 0, None, ""
        self.booted = self.world.loop.time()

    def fall_ill(self, how: str) -> None:
        self.sick = how
        self.was.add(how)

    async def call(self, work: Callable[[], _T], takes_s: float = 0.0) -> _T:
        """Do `work` at the server. Raises EngineLost if it, or its answer, is lost on the way."""
        await self.world.some_time(0.05)
        self._check(self.lives)
        life = self.lives
        if takes_s:
            self.loading += 1
            try:
                await asyncio.sleep(self.world.random.uniform(0.0, takes_s))
            finally:
                self.loading -= life == self.lives
            if life != self.lives:
                raise EngineLost(f"{self.url} has died")
        result = work()
        await self.world.some_time(0.05)
        self._check(life)
        return result

    def _check(self, life: int) -> None:
        if not self.answers or life != self.lives:
            raise EngineLost(f"{self.url} does not answer")

    async def sample(self, request: GenerateRequest, take: TakeChunk, lost: Callable[[], bool]) -> FinishReason | None:
        """Sample token by token, while it is not paused."""
        if self.mode is not None or self.loading:
            self.trespassers.append(f"{request.request_id} at {self.url}")
        await self.world.some_time(0.02)
        self._check(self.lives)
        if request.adapter is not None and request.adapter_name not in self.adapters:
            raise AdapterLost(f"{self.url} does not have adapter version {request.adapter}")
        life, aborts, taste = self.lives, self.aborts, self.adapters.get(request.adapter_name, 0)
        ids = following(request.input_ids, request.sampling.max_tokens or 0, taste)
        self.running += 1
        try:
            while ids:
                await asyncio.sleep(_TICK_S if self.mode is None and not self.sick else _LONG_TICK_S)
                self._check(life)
                if lost():
                    raise EngineLost(f"{self.url} was given up")
                if self.aborts != aborts:
                    take(TokenChunk(ids_of(), array("f"), self._named(request), FinishReason.ABORT))
                    return FinishReason.ABORT
                if self.sick == "fails":
                    raise EngineFailed(f"{self.url} is ill")
                if self.sick == "hangs" or self.mode is not None:
                    continue
                finish = FinishReason.LENGTH if len(ids) == 1 else None
                ended = take(TokenChunk(ids_of([ids.pop(0)]), array("f", [-0.5]), self._named(request), finish))
                if ended is not None:
                    return ended
            return FinishReason.LENGTH
        finally:
            self.running -= 1

    def _named(self, request: GenerateRequest) -> int:
        return self.version if request.adapter is None else request.adapter


class _Connection:
    """Implements `RemoteEngine` for one server."""

    adapterless = blind = ""
    world_size, leads, busy_elsewhere = 1, True, False

    def __init__(self, server: _Server) -> None:
        self.url, self._server, self._cuts = server.url, server, 0
        self._version = server.version

    async def start(self) -> None:
        """Nothing: it is connected."""

    async def check(self) -> int:
        return await self._call(lambda: self._server.version)

    async def finish_update(self) -> None:
        """Nothing: a load is one step here."""

    async def rests(self) -> bool:
        return await self._call(lambda: self._server.mode is not None)

    async def follow(self, mode: PauseMode | None, version: int | None) -> None:
        raise AssertionError("nobody else leads")

    def cut(self) -> None:
        self._cuts += 1

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        cuts = self._cuts
        return await self._server.sample(request, take, lambda: self._cuts != cuts)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return generated(self.sample, request)

    async def abort(self, request_id: str) -> None:
        """Nothing: who gives up cancels."""

    async def pause(self, mode: PauseMode) -> None:
        def paused() -> None:
            self._server.mode = mode
            self._server.aborts += mode is PauseMode.ABORT

        await self._call(paused)

    async def resume(self) -> None:
        def resumed() -> None:
            self._server.mode = None

        await self._call(resumed)

    async def update_weights(self, path: str, version: int | None = None, *, busy: bool = False) -> int:
        def loaded() -> int:
            assert version is not None
            self._server.version = self._version = version
            return version

        return await self._server.call(loaded, 1.0)

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        raise NotImplementedError

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        raise NotImplementedError

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        raise NotImplementedError

    async def flush_cache(self) -> None:
        raise NotImplementedError

    async def load_adapter(self, name: str, source: AdapterSource) -> None:
        def loaded() -> None:
            if self._server.sick == "fails":
                raise InvalidRequest(f"{self.url} is ill")
            self._server.adapters[name] = _number_in(source.path)

        await self._server.call(loaded)

    async def unload_adapter(self, name: str) -> None:
        await self._call(lambda: self._server.adapters.pop(name, None))

    async def adapters(self) -> frozenset[str]:
        return await self._call(lambda: frozenset(self._server.adapters))

    def info(self) -> EngineInfo:
        return EngineInfo("fake", "m", VOCABULARY, 100_000, self._version, frozenset(Capability))

    async def close(self) -> None:
        self._cuts += 1

    async def _call(self, work: Callable[[], _T]) -> _T:
        return await self._server.call(work)


def _number_in(path: str) -> int:
    """The number of an adapter, which its tokens depend on."""
    return int(path.rpartition("/")[2])


class _Pool(Pool):
    """Looks after every change whether all servers that take requests have it. `loose`: a weight update failed at all
    servers, so some may have newer weights than the pool knows.
    """

    def __init__(self, servers: Mapping[str, _Server]) -> None:
        self._servers = servers
        self.loose = False
        self.wrong: list[str] = []

        async def connect(url: str) -> Any:
            connection = _Connection(servers[url])
            connection._version = await connection.check()
            return connection

        super().__init__(list(servers), connect, start_timeout_s=5.0, check_s=_CHECK_S, engine_timeout_s=_TIMEOUT_S)

    @property
    def _state(self) -> PoolState:  # type: ignore[override]
        return self._known

    @_state.setter
    def _state(self, state: PoolState) -> None:
        before = getattr(self, "_known", state)
        if before.managed and not state.managed and not self.loose:
            self.wrong.append(f"the weights count as not the pool's: {before}, then {state}")
        self._known = state

    async def pause(self, mode: PauseMode) -> None:
        began = self._now()
        await super().pause(mode)
        self._check("is not paused", lambda server: server.mode is mode, began)

    async def resume(self) -> None:
        began = self._now()
        await super().resume()
        self._check("is still paused", lambda server: server.mode is None, began)

    async def update_weights(self, path: str, version: int | None = None) -> int:
        began = self._now()
        try:
            new = await super().update_weights(path, version)
        except ProxyError:
            self.loose = True
            raise
        self._check(f"has not version {new}", lambda server: server.version == new, began)
        return new

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _check(self, what: str, has: Callable[[_Server], bool], began: float) -> None:
        """All servers that are alive in the pool have it, unless they were started again meanwhile."""
        for member in self._alive():
            server = self._servers[member.url]
            if server.booted <= began and server.up and not has(server):
                self.wrong.append(f"after a change {member.url} {what}")

    def check(self) -> None:
        """Raise AssertionError if anything was wrong."""
        assert not self.wrong, self.wrong
        trespassers = [each for server in self._servers.values() for each in server.trespassers]
        assert not trespassers, f"requests came to a server during a pause: {trespassers}"


@contextmanager
def seeded(world: World) -> Iterator[None]:
    """Let breakers and the log go by the clock and the random numbers of the world."""
    with (
        mock.patch.object(Breaker.__init__, "__defaults__", (world.loop.time, world.random.random)),
        mock.patch.object(ServerEvents.__init__, "__defaults__", (lambda: False, world.loop.time)),
    ):
        yield


async def _control(world: World, admin: Any) -> None:
    """Pauses in all modes and weight updates. Whether all servers are away decides whether they succeed."""
    for _ in range(world.random.randrange(1, 5)):
        await world.some_time(2.0)
        mode = world.random.choice(list(PauseMode))
        with suppress(ProxyError):
            if world.random.random() < 0.5:
                await admin.update_weights("w", None, mode)
                continue
            await admin.pause(mode)
            await world.some_time(2.0)
            if world.random.random() < 0.5:
                with suppress(ProxyError):
                    await admin.update_weights("w", None, mode)
            await admin.resume()


async def _publish(world: World, pool: Pool, live: list[int]) -> None:
    """Load adapters, one after the other; `live`: those that are loaded at all servers."""
    for version in range(1, world.random.randrange(1, 6)):
        await world.some_time(2.0)
        with suppress(ProxyError):
            await pool.load_adapter(version, AdapterSource(f"/adapters/{version}"))
            live.append(version)


async def _mishaps(world: World, pool: Pool, server: _Server) -> None:
    """What happens to a server, one after the other; at the end it is well."""
    for _ in range(world.random.randrange(4)):
        await world.some_time(2.0)
        kind = world.random.choice(["dies", "cut off", "fails", "hangs", "leaves"])
        if kind == "dies":
            server.die()
            await world.some_time(2.0)
            server.rise()
        elif kind == "cut off":
            server.reachable = False
            await world.some_time(1.0)
            server.reachable = True
        elif kind in ("fails", "hangs"):
            server.fall_ill(kind)
            await world.some_time(3.0 if kind == "fails" else 60.0)
            server.sick = ""
        else:
            await _leave(world, pool, server)


async def _leave(world: World, pool: Pool, server: _Server) -> None:
    """Leave the pool, and join it again: started anew, as the pool may not have reached it to end a pause."""
    await pool.remove(server.url)
    await world.some_time(1.0)
    server.die()
    await world.some_time(0.5)
    server.rise()
    for _ in range(200):
        try:
            await pool.add(server.url)
        except InvalidRequest:
            await asyncio.sleep(0.5)
        else:
            return
    raise AssertionError(f"{server.url} cannot join again: {pool.servers()}")


async def _end(world: World, pool: _Pool, gate: AdminGate, servers: Mapping[str, _Server], live: Sequence[int]) -> None:
    """Once all servers are well, all of them come back, with the weights of the next update and all `live` adapters."""
    await asyncio.sleep(3 * _TIMEOUT_S)
    version = await gate.admin.update_weights("w", None, PauseMode.IN_PLACE)
    for _ in range(600):
        if all(shown["state"] == "alive" for shown in pool.servers()):
            break
        await asyncio.sleep(0.5)
    assert [shown["state"] for shown in pool.servers()] == ["alive"] * len(servers), pool.servers()
    for server in servers.values():
        assert server.version == version and server.mode is None and not server.running, vars(server)
    reply = await gate.read(asking("last", 3))
    assert set(reply.versions) == {version}
    for adapter in live:
        request = replace(asking(f"with {adapter}", 3), adapter=adapter)
        assert list((await gate.read(request)).ids) == following(request.input_ids, 3, adapter)
    names = {pool._adapters.name_of(adapter) for adapter in live}
    for _ in range(600):
        if all(server.adapters.keys() == names for server in servers.values()):
            break
        await asyncio.sleep(0.5)
    assert all(server.adapters.keys() == names for server in servers.values()), [vars(s) for s in servers.values()]
    assert gate.running == gate.waiting == 0 and not gate.state.held and not gate._flights


@scenario
async def pool_of_servers(world: World) -> None:
    """Each request gets its tokens, of weights that were in force when it began or later; no server misses a change."""
    urls = [f"http://s{number}:1" for number in range(world.random.randrange(2, 5))]
    servers = {url: _Server(world, url) for url in urls}
    with seeded(world):
        pool = _Pool(servers)
        await pool.start()
        gate = AdminGate(pool, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)

        live: list[int] = []

        async def caller(number: int) -> None:
            for part in range(world.random.randrange(1, 4)):
                await world.some_time(3.0)
                request = asking(f"{number}.{part}", world.random.randrange(1, 60), start=40 + number)
                await asked(replace(request, adapter=world.random.choice([None, *live])))

        async def asked(request: GenerateRequest) -> None:
            begun, reply = pool._state, CollectedReply()

            async def sampled() -> FinishReason:
                return await gate.sample(request, reply.add)

            ill = {how for server in servers.values() for how in server.was}
            try:
                finish = await world.abandon_some(sampled(), 1.0, chance=0.2)
            except (EngineFailed, EngineTimeout, EngineLost) as error:
                ill |= {how for server in servers.values() for how in server.was}
                assert ill, f"no server was ill, and yet: {error}"
                return
            if finish is not None:
                if request.adapter is not None:
                    assert list(reply.ids) == following(request.input_ids, len(reply.ids), request.adapter)
                    assert set(reply.versions) == {request.adapter} and len(reply.ids) == request.sampling.max_tokens
                    return
                assert list(reply.ids) == uninterrupted(request)
                if not pool.loose:
                    assert list(reply.versions) == sorted(reply.versions), reply.versions
                    assert not begun.managed or reply.versions[0] >= begun.version, (begun, reply.versions)

        await world.all(
            *(caller(number) for number in range(4)),
            *(_mishaps(world, pool, server) for server in servers.values()),
            _control(world, gate.admin),
            _publish(world, pool, live),
        )
        pool.check()
        await _end(world, pool, gate, servers, live)
        pool.check()
        await pool.close()
        assert not pool._looks and not pool._trust._proofs._running
