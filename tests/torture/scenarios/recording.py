"""Runs of episodes that are stopped or cancelled at every moment: an ended episode is recorded whole or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest import mock

from tests.torture.fibres import running_loop, sleep
from tests.torture.runs import World, scenario
from tests.torture.sites import Site
from tests.torture.wire import Wires
from tokengrove.client import AsyncClient
from tokengrove.rollout.episodes import AgentSpec, Episode, EpisodePlan, EpisodeResult, Server, Task, play
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs import Observer, Summary, journal
from tokengrove.runs.journal import Journal
from tokengrove.runs.run import Run
from tokengrove.runs.slots import Planner, slots_of

_RUN = "run"


class _Threads:
    """Stands for `ThreadPoolExecutor` over a slow disk: its threads are fibres."""

    def __init__(self, most: int, thread_name_prefix: str = "") -> None:
        self._executor = ThreadPoolExecutor(most)  # which starts no thread

    def submit(self, work: Callable[[], object]) -> None:
        loop = running_loop()
        slow_s = loop.random.uniform(0.0, 0.2)

        def slowly() -> None:
            sleep(slow_s)
            work()

        loop.run_in_executor(self._executor, slowly)

    def shutdown(self) -> None:
        self._executor.shutdown()


class _Agent:
    """Asks once or twice over a connection of its own, and fails now and then."""

    def __init__(self, world: World, wires: Wires) -> None:
        self._world, self._wires = world, wires

    async def play(self, episode: Episode) -> Reward:
        headers = {"authorization": f"Bearer {episode.session.api_key}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Name a tree."}]
        async with self._wires.client("server") as http:
            for _ in range(self._world.random.randrange(1, 3)):
                await self._world.some_time(0.3)
                path = f"http://t/{episode.session.session_id}/v1/chat/completions"
                answer = await http.post(path, json={"messages": messages, "max_tokens": 5}, headers=headers)
                answer.raise_for_status()
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        if self._world.random.random() < 0.2:
            raise RuntimeError("the agent gave up")
        return self._world.random.choice([0.0, 1.0])

    async def close(self) -> None:
        """Nothing to close."""


class _Executor:
    """Plays in this process. `returned`: what it gave to the run."""

    def __init__(self, agent: _Agent, client: AsyncClient) -> None:
        self._agent, self._client = agent, client
        self.returned: list[EpisodeResult] = []

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        result = await play(plan, self._agent, self._client)
        self.returned.append(result)
        return result

    async def close(self) -> None:
        """Nothing to close."""


class _Watching(Observer):
    """Counts how often it is told of the end of each attempt."""

    def __init__(self) -> None:
        self.told = Counter[str]()

    def retried(self, result: EpisodeResult) -> None:
        self.told[result.session_id] += 1

    def finished(self, result: EpisodeResult) -> None:
        self.told[result.session_id] += 1


class _Played:
    """A run over a server in process."""

    def __init__(self, world: World, client: AsyncClient, agent: _Agent) -> None:
        random = world.random
        options = RunOptions(
            agent="a:b",
            folder=None,
            concurrency=random.randrange(1, 4),
            group_size=2,
            retries=random.randrange(2),
            retry_on=("agent",),
        ).checked()
        tasks = [Task(f"t{number}", {}) for number in range(random.randrange(1, 3))]
        self._slots = list(slots_of(tasks, options))
        self.path = world.folder / "journal"
        self.journal = Journal(self.path)
        self.executor, self.observer = _Executor(agent, client), _Watching()
        self.summary = Summary("r", len(self._slots), options.group_size, 1.0)
        planner = Planner(_RUN, options, Server("http://t"), AgentSpec("path", "a:b"), seed=7)
        self.run = Run(options, planner, self.executor, self.summary, self.observer, self.journal)

    async def play(self) -> None:
        await self.run.play(self._slots, {})

    def check(self) -> None:
        """Whatever has ended is in the journal, in the numbers and with the observer, once each, or in none of them."""
        again = Journal(self.path)
        entries = again.entries
        again.close()
        written = Counter(entry.result.session_id for entry in entries)
        returned = Counter(result.session_id for result in self.executor.returned)
        assert set(written.values()) <= {1}, "an episode is written twice"
        assert written == returned, f"written: {written}, ended: {returned}"
        assert written == self.observer.told, f"written: {written}, told: {self.observer.told}"
        last = {entry.slot: entry.result for entry in entries if not entry.again}
        kept = {slot: result.session_id for slot, result in self.run.entries.items()}
        assert kept == {slot: result.session_id for slot, result in last.items()}, "the numbers lack an episode"
        assert self.summary.ended == len(last)
        assert self.summary.retries.total() == len(entries) - len(last)
        if self.summary.stopped is None:
            assert len(last) == len(self._slots)


async def _check_sessions(site: Site, results: list[EpisodeResult]) -> None:
    """No session is live, and each is what the result of its episode says."""
    listed = (await site.ok("GET", "/rl/sessions"))["sessions"]
    sessions = {each["session_id"]: each for each in listed}
    live = [name for name, each in sessions.items() if each["status"] != "ended"]
    assert not live, f"sessions are left: {live}"
    for result in results:
        session = sessions.get(result.session_id)
        if result.failure is None:
            assert session is not None and session["outcome"] == "Finished", (result, session)
            tree = await site.ok("GET", f"/rl/sessions/{result.session_id}")
            rewards = [node["reward"] for node in tree["interactions"]]
            assert rewards[-1] == result.reward and len(rewards) == result.turns, (rewards, result)
        else:
            assert session is None or session["outcome"] != "Finished", (result, session)


async def _some_moment(world: World, played: _Played) -> None:
    """Wait for any time, or until a while after an episode has ended."""
    latest = world.loop.time() + world.random.uniform(0.0, 4.0)
    count = world.random.randrange(4)
    await world.until(lambda: world.loop.time() >= latest or 0 < count <= len(played.executor.returned))
    await world.some_time(0.3)


@scenario
async def recording_of_episodes(world: World) -> None:
    """A run is stopped or cancelled at any moment: what has ended is written and counted, and no session is left."""
    site, wires = Site(world), Wires(world.loop)
    with mock.patch.object(journal, "ThreadPoolExecutor", _Threads):
        async with site.running(), AsyncClient("http://t") as client:
            wires.apps["server"] = site.apps[0]
            await client._http.aclose()
            client._http = wires.client("server")
            played = _Played(world, client, _Agent(world, wires))
            playing = asyncio.create_task(played.play())
            ends = world.random.choice(["all", "stopped", "cancelled", "cancelled twice"])
            if ends != "all":
                await _some_moment(world, played)
                if ends == "stopped":
                    played.run.stop("somebody stops it")
                else:
                    playing.cancel()
                    played.summary.stopped = "cancelled"
                if ends == "cancelled twice":
                    await world.some_time(0.3)
                    playing.cancel()
                    for task in list(played.run._scheduler._tasks):
                        task.cancel()
            with suppress(asyncio.CancelledError):
                await playing
            assert not played.run._scheduler._tasks, "it has ended, and yet it plays"
            await asyncio.to_thread(played.journal.close)
            await world.until(lambda: not wires.exchanges)
            played.check()
            await _check_sessions(site, played.executor.returned)
