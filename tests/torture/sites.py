"""A whole server in process: one worker or several on one database, its clients, and what must hold at its end."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

from sqlalchemy import Connection, event

from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.commands.audit import audit
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply
from proxy.serving.server import Stopping
from proxy.settings import Settings
from proxy.store import schema
from proxy.store.inspection import inspecting
from proxy.store.writer import Change, ChangeResult
from proxy.turns import prompts
from proxy.turns.turns import GRACE_S
from proxy.workers.attempt_table import AttemptTable
from proxy.workers.group import Place
from tests.databases import execute
from tests.engines.scripts import following, model_like
from tests.support import migrated, tiny_renderer
from tests.torture.fibres import sleep
from tests.torture.runs import World
from tests.torture.wire import Exchange, Wires
from tokengrove.options.start import Replay

DATABASE = "torture.db"
JSON = (b"content-type", b"application/json")


class Called(Protocol):
    """What agents, environments and trainers call: one server, or several behind one address."""

    async def call(
        self, method: str, path: str, body: Any = None, *, leave: float = 0.0, number: int | None = None, **headers: str
    ) -> Exchange | None:
        """See `Site.call`."""

    async def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """See `Site.ok`."""

    async def check_stored(self, session: str, answered: Mapping[int, set[str]], *, once: bool = True) -> None:
        """See `Site.check_stored`."""


class _Front:
    """What takes the place of uvicorn when a worker stops: the exchanges that have begun."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self.exchanges, self.exiting, self.force_exit = exchanges, asyncio.Event(), False

    async def cut(self) -> None:
        for exchange in self.exchanges:
            exchange.leave()
        await asyncio.sleep(0.3)
        for exchange in self.exchanges:
            exchange.task.cancel()


class Site:
    """`workers`: how many there are. `most`: `--max-turns-in-flight`. Sampling a token takes `tick_s`.

    `alone`: it has the database for itself, as a server of one process on SQLite; else others may write there too.
    `replicas`: how many servers do.
    """

    def __init__(
        self,
        world: World,
        *,
        workers: int = 1,
        tick_s: float = 0.01,
        alone: bool = False,
        replicas: int = 1,
        **settings: Any,
    ) -> None:
        self._workers = workers
        self._lock = SimpleNamespace(release=lambda: None) if alone else None
        self._world, self._wires = world, Wires(world.loop)
        database = world.folder / DATABASE
        if not database.exists():
            database.write_bytes(migrated())
        self.settings = Settings(
            **{"database_url": f"sqlite:///{database}", "migrate": True, "engine": "scripted"}
            | {"replay": (Replay.TOP_LOGPROBS.value,)}
            | settings
        )
        self._script = model_like(tick_s)
        # A lock of SQLite is waited for in real time.
        self._slow = world.random.choice([0.0, 0.0, 0.1]) if workers == replicas == 1 else 0.0
        self._late = world.random.choice([0.0, 0.1, 0.5]) if replicas > 1 else 0.0
        self._attempt_table = AttemptTable(workers, 100) if workers > 1 else None
        self._stacks: dict[int, AsyncExitStack] = {}
        self._exchanges: set[Exchange] = set()
        self.apps: dict[int, App] = {}
        self.engines: list[ScriptedEngine] = []
        self.sampled = Counter[int]()
        """How many requests with each seed reached an engine."""
        self._trespassers: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all workers; at the end stop them, and check what is left of each."""
        inline = self._world.random.choice([0, prompts._INLINE_CHARS])  # 0: all prompts are rendered in threads
        with (
            self._wires.replaced(),
            mock.patch.object(schema, "lock_file", lambda url: self._lock),
            mock.patch.object(prompts, "_INLINE_CHARS", inline),
        ):
            for number in range(self._workers):
                await self.start(number)
            try:
                yield
            finally:
                for number in sorted(self._stacks, reverse=True):
                    await self.stop(number)

    async def start(self, number: int = 0) -> None:
        """Start a worker."""
        place = None if self._attempt_table is None else Place(number, self._attempt_table, self._world.folder)
        renderer = tiny_renderer()
        engine = ScriptedEngine(lambda request: self._play(engine, request), vocab_size=renderer.vocab_size)
        app = build_app(self.settings, engine=engine, renderer=renderer, place=place)
        event.listen(app.state.store.database._writer_engine, "commit", self._commits)
        writer = app.state.store.database.write
        plainly = writer._apply_plainly

        def slowly(connection: Connection, group: list[Change]) -> list[ChangeResult]:
            self._commits(connection)
            return plainly(connection, group)

        writer._apply_plainly = slowly
        event.listen(app.state.store.database._reader_engine, "after_cursor_execute", self._reads)
        if place is not None:
            self._wires.apps[place.peers.address()] = app.state.for_workers
        stack = self._stacks[number] = AsyncExitStack()
        await stack.enter_async_context(app.router.lifespan_context(app))
        self.apps[number] = app
        self.engines.append(engine)

    def _commits(self, connection: Connection) -> None:
        """Let some commits take as long as the grace of a client that left."""
        if self._world.loop.chance(self._slow):
            sleep(self._world.random.uniform(0.0, 1.5 * GRACE_S))

    def _reads(self, *_: object) -> None:
        """Let what some reads have found arrive late."""
        if self._world.loop.chance(self._late):
            sleep(self._world.random.uniform(0.0, 0.2))

    async def stop(self, number: int = 0) -> None:
        """Stop a worker as the server does, and check that nothing of it stays."""
        app = self.apps.pop(number)
        front = _Front([exchange for exchange in self._exchanges if exchange.app is app])
        stopping = Stopping(app, self.settings, told=False)
        ending = asyncio.create_task(stopping.end_requests(front))  # type: ignore[arg-type]
        front.exiting.set()
        if front.exchanges:
            await asyncio.wait([exchange.task for exchange in front.exchanges])
        ending.cancel()
        await stopping.cut(front)  # type: ignore[arg-type]
        await self._stacks.pop(number).aclose()
        if self._attempt_table is not None:
            self._wires.apps.pop(str(self._world.folder / f"worker-{number}.sock"))
        self.check_idle(app)

    @property
    def paused(self) -> bool:
        """The engines of all workers are paused."""
        return all(app.state.engine.common()["mode"] is not None for app in self.apps.values())

    async def restarts(self) -> None:
        """Stop and start the server at some moments."""
        for _ in range(self._world.random.randrange(1, 3)):
            await self._world.some_time(1.0)
            await self.stop()
            await self._world.some_time(0.5)
            await self.start()

    def forget_idle(self) -> None:
        """Let sessions leave memory that no turn and nobody's wait uses, as after a while."""
        for app in self.apps.values():
            for session in app.state.registry.sessions():
                if not (session.running or session.waiting):
                    app.state.registry.forget(session)

    def check_idle(self, app: App) -> None:
        """Raise AssertionError unless everything is as it was before the first request."""
        turns = app.state.turns
        gate = turns.routes.main.gate
        assert not self._trespassers, f"requests came to a paused engine: {self._trespassers}"
        assert not turns.running.busy and not turns.running.count and not turns.earlier.running, "turns are left"
        assert gate.running == gate.waiting == 0 and not gate._flights, "requests are left in the gate"
        assert not app.state.engine.running, "requests are left in the engine"
        assert not turns.routes.main.prompts._pool.waiting and not turns.routes.main.prompts._pool._running, (
            "the pool is busy"
        )
        here = app.state.senders
        for tally in (here.running, here.queued, here.work, here.body_bytes, here.wrong_keys):
            assert not tally.of and not tally.of_host and not tally.total, f"senders count what has ended: {tally.of}"
        assert not turns.running._places._waiting and not turns._turnstile._waiting, "somebody waits for a place"
        write, process = app.state.store.database.write, app.state.metrics.process
        assert not write._waiting() and not process.body_bytes.now()[()], "changes, reads or bodies wait"
        for session in app.state.registry.sessions():
            assert not session.running and not session.waiting, f"the session {session.id} counts turns that have ended"
        if self._attempt_table is not None and not self.apps:
            assert not self._attempt_table.turns() and not any(
                self._attempt_table.words[number * self._attempt_table.part // 8]
                for number in range(self._attempt_table.workers)
            ), "table are taken"

    async def call(
        self, method: str, path: str, body: Any = None, *, leave: float = 0.0, number: int | None = None, **headers: str
    ) -> Exchange | None:
        """Send a request to a worker; None if nobody listens. `leave`: how likely the client leaves somewhere."""
        app = self._any_app(number)
        if app is None:
            return None
        sent = [JSON, *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())]
        content = b"" if body is None else json.dumps(body).encode()
        exchange = Exchange(self._world.loop, app, method, path, sent, content)
        self._exchanges.add(exchange)
        try:
            if self._world.random.random() < leave:
                leaving = asyncio.create_task(self._world.some_time(0.3))
                await asyncio.wait([exchange.task, leaving], return_when=asyncio.FIRST_COMPLETED)
                exchange.leave()
                await leaving
            await asyncio.wait([exchange.task])
            if not exchange.task.cancelled():
                exchange.task.result()
        finally:
            self._exchanges.discard(exchange)
        return exchange

    async def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON that a request gets. Raises AssertionError if it is refused."""
        exchange = await self.call(method, path, body, **headers)
        assert exchange is not None and exchange.status == 200, exchange and (exchange.status, exchange.content)
        return exchange.body

    def _any_app(self, number: int | None) -> App | None:
        numbers = sorted(self.apps)
        if not numbers:
            return None
        return self.apps[self._world.random.choice(numbers) if number is None else number]

    def _play(self, engine: ScriptedEngine, request: GenerateRequest) -> Reply:
        self.sampled[request.sampling.seed or 0] += 1
        if engine.common()["mode"] is not None:
            self._trespassers.append(request.request_id)
        running = sum(len(engine.running) for engine in self.engines)
        assert running <= self.settings.max_turns_in_flight, "more turns run than --max-turns-in-flight"
        return self._script(request)

    async def check_stored(self, session: str, answered: Mapping[int, set[str]], *, once: bool = True) -> None:
        """Raise AssertionError unless each answered turn is stored once, and no token is trained twice.

        `answered`: by seed, the ids of the replies that clients got in full. `once`: no request was sampled twice.
        """
        complete = await self._complete(session)
        samples = (await self.ok("POST", "/trajectories/export", {"session_id": session}))["samples"]
        while (now := await self._complete(session)).keys() != complete.keys():  # a turn nobody waits for has ended
            complete = now
            samples = (await self.ok("POST", "/trajectories/export", {"session_id": session}))["samples"]
        seen, trained = dict[str, int](), 0
        for sample in samples:
            trained += sum(sample["loss_mask"])
            for turn in sample["turns"]:
                start, end = turn["span"]
                ids, seed = sample["input_ids"], turn["sampling"].get("seed") or 0
                assert ids[start:end] == following(ids[:start], end - start, seed), turn
                seen[turn["interaction_id"]] = seed
        assert set(seen) == set(complete), "the export and the tree differ"
        expected = sum(node["output_tokens"] for node in complete.values() if node["trainable"])
        assert trained == expected, f"{trained} tokens are trained, {expected} were sampled"
        for seed, ids in answered.items() if once else ():
            whole = [
                one for one in seen if seen[one] == seed and "." not in one and _choices(one, len(ids)) <= set(complete)
            ]
            assert len(whole) <= 1, f"a request was sampled twice: {whole}"
        for ids in answered.values():
            assert ids <= set(complete), f"an answered turn is not stored: {ids}"

    async def _complete(self, session: str) -> dict[str, Any]:
        tree = await self.ok("GET", f"/rl/sessions/{session}")
        return {node["id"]: node for node in tree["interactions"] if node["status"] == "complete"}


def check_database(world: World) -> None:
    """Raise AssertionError unless the database, which no server uses any more, is as `tokengrove db check` wants it.

    Each turn has its two replay columns.
    """
    url = f"sqlite:///{world.folder / DATABASE}"
    with inspecting(url) as inspection:
        found = audit(inspection)
    assert not found.findings, [str(finding) for finding in found.findings]
    assert not found.begun_not_ended, f"{found.begun_not_ended} calls have begun and not ended"
    [(turns,)] = execute(url, "SELECT count(*) FROM interactions WHERE status = 'complete' AND output_tokens > 0")
    [(columns,)] = execute(url, "SELECT count(*) FROM side_columns")
    assert columns == 2 * turns, f"{turns} turns have {columns} replay columns"


def _choices(first: str, n: int) -> set[str]:
    """The ids of the `n` choices of a reply, by that of the first."""
    return {first, *(f"{first}.{index}" for index in range(1, n))}
