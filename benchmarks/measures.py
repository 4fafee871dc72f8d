"""What is measured of a gateway, phase by phase: turns, exactness, latency, streamed tokens, memory, and a kill."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.client import Address, Load, Played
from benchmarks.gateways.base import Gateway, Place
from benchmarks.processes import NotStarted, Process
from benchmarks.sampling import SHORTEST
from benchmarks.scoring import Key, Sample, Sampled, count_breaks, score
from benchmarks.sessions import Session, Shape, Turn, shapes, workload

GATEWAY_CORE = 0
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    `per_shape`: sessions of each shape for turns and exactness. `alone_per_shape`: for latency. `streams`: streams of
    `stream_tokens` tokens beyond the shortest, `lanes` at a time, at `rate` tokens a second. `held`: sessions that
    stay open. `kill_per_shape`: sessions for the kill, which comes after `killed_after` answers; the engine then
    samples at `kill_rate` tokens a second. `image_sessions`: sessions with screenshots.
    """

    per_shape: int = 2
    alone_per_shape: int = 1
    streams: int = 32
    stream_tokens: int = 200
    lanes: int = 16
    rate: float = 50.0
    held: int = 250
    kill_per_shape: int = 1
    killed_after: int = 60
    kill_rate: float = 1_000.0
    image_sessions: int = 2

    @staticmethod
    def quick() -> Plan:
        """A plan that shows in under a minute a gateway that everything works. Its figures are rough."""
        return Plan(per_shape=1, streams=16, stream_tokens=40, held=40, killed_after=40, image_sessions=1)


@dataclass(slots=True)
class Logs:
    """What the engine logged since the last phase."""

    entries: list[dict[str, Any]]

    @property
    def answers(self) -> list[Sampled]:
        return [Sampled.of(entry) for entry in self.entries]

    def by_key(self) -> dict[Key, dict[str, Any]]:
        return {(entry["session"], entry["turn"], entry["attempt"]): entry for entry in self.entries}


@dataclass(slots=True)
class Bench:
    """A gateway in front of an engine. `first`: the number of the next session; no two phases share one."""

    gateway: Gateway
    place: Place
    engine: Process
    http: aiohttp.ClientSession
    plan: Plan
    process: Process = field(init=False)
    first: int = 0
    ready_s: float = 0.0

    async def start(self) -> None:
        """Start the gateway, also again after a kill: on the same port and folder. Raises NotStarted."""
        began = time.monotonic()
        start = self.gateway.start(self.place)
        log = self.place.folder / "output.log"
        self.process = Process(start.command, self.place.port, log, start.environment, GATEWAY_CORE)
        await asyncio.to_thread(self.process.wait_until_answering, self.gateway.health)
        await self.gateway.prepare(self.http, self.place)
        self.ready_s = time.monotonic() - began

    async def run(self) -> Figures:
        """Run all phases. Raises PhaseFailed."""
        figures: Figures = {"ready_s": self.ready_s, "rss_idle_mb": self.process.rss_mb()}
        await self._play(workload(1, first=self._take(), kinds=["recorded"])[-3:])
        figures["turns"], figures["exactness"] = await self._turns()
        figures["latency"] = await self._latency()
        figures["streams"] = await self._streams() if self.gateway.streams else None
        figures["memory"] = await self._memory()
        figures["kill"] = await self._kill()
        figures["images"] = await self._images()
        return figures

    async def latency_alone(self) -> Figures:
        """Return only the latencies, for the engine without a gateway."""
        return {"latency": await self._latency()}

    async def _turns(self) -> tuple[Figures, Figures]:
        sessions = workload(self.plan.per_shape, first=self._take())
        cpu_s, began = self.process.cpu_s(), time.monotonic()
        played = await self._play(sessions)
        wall_s, cpu_s = time.monotonic() - began, self.process.cpu_s() - cpu_s
        logs = await self._log()
        turns, tokens = len(played.read), sum(len(entry["sampled"]) for entry in logs.entries)
        figures = {
            **{
                "turns": turns,
                "tokens": tokens,
                "failures": played.failures[:5],
                "failed_sessions": len(played.failures),
            },
            **{"cpu_ms": 1e3 * cpu_s / turns, "a_core": turns / cpu_s, "wall": turns / wall_s},
        }
        return figures, await self._exactness(sessions, played, logs)

    async def _exactness(self, sessions: Sequence[Session], played: Played, logs: Logs) -> Figures:
        broken, continuing = count_breaks(logs.answers, played.continued)
        context = {"broken_turns": broken, "continuing_turns": continuing}
        if self.gateway.no_tokens:
            return {"no_tokens": self.gateway.no_tokens, **context}
        began = time.monotonic()
        samples = await self._export(sessions)
        export_s = time.monotonic() - began
        return {**score(logs.answers, played.seen, samples).to_json(), **context, "export_s": export_s}

    async def _latency(self) -> Figures:
        """Time of a turn beyond the engine's own, one request at a time."""
        sessions = workload(self.plan.alone_per_shape, first=self._take(), kinds=["recorded"])
        played = await self._play(sessions, lanes=1, stream=False)
        logged = (await self._log()).by_key()
        own = {key: entry["ended"] - entry["began"] for key, entry in logged.items()}
        return _quantiles([read.ended - read.began - own[read.key] for read in played.read])

    async def _streams(self) -> Figures:
        """CPU time of a further token, and its delay between the engine and the agent."""
        await self._pace(self.plan.rate)
        short = await self._stream(SHORTEST)
        long = await self._stream(SHORTEST + self.plan.stream_tokens)
        await self._pace(None)
        cpu_us = 1e6 * (long["cpu_s"] - short["cpu_s"]) / (self.plan.streams * self.plan.stream_tokens)
        return {"cpu_us": cpu_us, "a_core": 1e6 / cpu_us, **long["delays"], "first_token": long["first"]}

    async def _stream(self, tokens: int) -> Figures:
        shape = Shape("streams", "drawn", True, 0, [Turn(None, [("user", 64)], tokens, False)])
        first = self._take()
        sessions = [Session(first + place, shape, place) for place in range(self.plan.streams)]
        cpu_s = self.process.cpu_s()
        played = await self._play(sessions, lanes=self.plan.lanes)
        cpu_s = self.process.cpu_s() - cpu_s
        logged = (await self._log()).by_key()
        firsts, delays = list[int](), list[int]()
        for read in played.read:
            found = delays_of(logged[read.key]["parts"], read.arrivals)
            firsts += found[:1]
            delays += found
        return {"cpu_s": cpu_s, "delays": _quantiles(delays), "first": _quantiles(firsts)}

    async def _memory(self) -> Figures:
        """Resident memory of sessions that are open: two turns each, 3,000 tokens at their end."""
        shape = next(shape for shape in shapes() if shape.name.startswith("deepagents")).first(2)
        first, before = self._take(), self.process.rss_mb()
        played = await self._play([Session(first + place, shape, place) for place in range(self.plan.held)])
        await self._log()
        after = self.process.rss_mb()
        held = len({read.key[0] for read in played.read})
        return {"sessions": held, "rss_mb": after, "mb_per_1000": 1e3 * (after - before) / held}

    async def _kill(self) -> Figures:
        """Kill the gateway under load, start it again, and let the agents go on."""
        sessions = workload(self.plan.kill_per_shape, first=self._take())
        await self._pace(self.plan.kill_rate)
        enough, ready, restarted_s = asyncio.Event(), asyncio.Event(), 0.0
        before: set[Key] = set()
        ready.set()

        def on_read(played: Played) -> None:
            if not enough.is_set() and len(played.read) >= self.plan.killed_after:
                ready.clear()
                before.update(played.seen)
                self.process.kill()
                enough.set()

        tries: dict[asyncio.Task[Any] | None, int] = {}

        async def retry() -> bool:
            task = asyncio.current_task()
            tries[task] = tries.get(task, 0) + 1
            await ready.wait()
            return enough.is_set() and tries[task] <= 3

        async def restart() -> float:
            await enough.wait()
            began = time.monotonic()
            await self.start()
            ready.set()
            return time.monotonic() - began

        restarting = asyncio.create_task(restart())
        played = await self._load(32, None, on_read, retry).play(sessions)
        if not enough.is_set():
            restarting.cancel()
            with suppress(asyncio.CancelledError):
                await restarting
            raise PhaseFailed(f"the load ended before the kill: {played.failures[:3]}")
        restarted_s = await restarting
        await self._pace(None)
        logs = await self._log()
        figures: Figures = {
            **{"seen_before": len(before), "seen": len(played.read), "restart_s": restarted_s},
            **{"failed_sessions": len(played.failures), "sessions": len(sessions), "failures": played.failures[:5]},
        }
        if self.gateway.no_tokens:
            return {**figures, "no_tokens": self.gateway.no_tokens}
        samples = await self._export(sessions)
        lost = score(logs.answers, before & played.seen, samples)
        whole = score(logs.answers, played.seen, samples)
        return {**figures, "lost_answers": lost.lost_turns, "lost_tokens": lost.lost, "of_all": whole.to_json()}

    async def _images(self) -> Figures:
        """Play sessions with screenshots, in front of a model that sees."""
        self.process.stop()
        folder = self.place.folder / "images"
        await asyncio.to_thread(folder.mkdir)
        vision = self.place.model.with_name(f"{self.place.model.name}-vision")
        self.place = replace(self.place, folder=folder, model=vision)
        try:
            await self.start()
            sessions = workload(self.plan.image_sessions, first=self._take(), kinds=["images"])
            played = await self._play(sessions)
        except (NotStarted, PhaseFailed) as error:
            return {"failed": str(error)}
        logs = await self._log()
        figures = {"turns": len(played.read), "failures": played.failures[:5]}
        return {**figures, **await self._exactness(sessions, played, logs)}

    async def _play(self, sessions: Iterable[Session], lanes: int | None = None, stream: bool | None = None) -> Played:
        played = await self._load(lanes or self.plan.lanes, stream).play(sessions)
        if not played.read:
            raise PhaseFailed(f"no answer was read: {played.failures[:3]}")
        return played

    def _load(self, lanes: int, stream: bool | None, *more: Any) -> Load:
        async def open_session(http: aiohttp.ClientSession, session: int) -> Address:
            return await self.gateway.open(http, self.place, session)

        return Load(open_session, lanes, stream if self.gateway.streams else False, *more)

    async def _export(self, sessions: Iterable[Session]) -> list[Sample]:
        found = []
        for session in sessions:
            found += await self.gateway.export(self.http, self.place, session.number)
        return found

    async def _log(self) -> Logs:
        async with self.http.get(f"{self.engine.url}/bench/log") as response:
            return Logs(await response.json())

    async def _pace(self, rate: float | None) -> None:
        async with self.http.post(f"{self.engine.url}/bench/pace", json={"rate": rate, "part": 1}) as response:
            response.raise_for_status()

    def _take(self) -> int:
        self.first += 10_000
        return self.first


class PhaseFailed(RuntimeError):
    """A phase of which nothing can be reported."""


def delays_of(parts: Sequence[Sequence[int]], arrivals: Sequence[tuple[int, int]]) -> list[int]:
    """Return how long each part with text took from the engine to the agent, in ns.

    `parts`: when the engine sent each part, the tokens and the characters so far. `arrivals`: when the agent read an
    event, and the characters so far. A part has arrived with the first event that has all its characters.
    """
    delays, place, before = list[int](), 0, 0
    for sent, _, characters in parts:
        if characters == before:
            continue
        before = characters
        while place < len(arrivals) and arrivals[place][1] < characters:
            place += 1
        if place == len(arrivals):
            break
        delays.append(arrivals[place][0] - sent)
    return delays


def _quantiles(times_ns: Sequence[int]) -> Figures:
    if len(times_ns) < 2:
        raise PhaseFailed(f"{len(times_ns)} times are too few for quantiles")
    cuts = statistics.quantiles(times_ns, n=100, method="inclusive")
    return {"p50_ms": cuts[49] / 1e6, "p99_ms": cuts[98] / 1e6, "count": len(times_ns)}


def engine_of(model: Path, port: int, log: Path, root: Path, python: str) -> Process:
    """Start an engine on the cores that the gateway does not have, and wait until it answers."""
    command = [python, "-m", "benchmarks.engine", str(model), str(port)]
    engine = Process(command, port, log, {"PYTHONPATH": str(root)}, -1)
    engine.wait_until_answering("/health")
    return engine
