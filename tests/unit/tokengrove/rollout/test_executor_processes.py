"""Worker processes that die, hang, stop or are left with threads: they take only their own episodes with them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import real_server, until
from tokengrove.client import AsyncClient
from tokengrove.rollout import child_process
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task
from tokengrove.rollout.executors import process_host
from tokengrove.rollout.executors.places import Shape
from tokengrove.rollout.executors.pooled import PooledExecutor
from tokengrove.rollout.executors.process_host import ProcessHost
from tokengrove.rollout.executors.watchdog import groups

pytestmark = pytest.mark.processes

HERE = "tests.unit.tokengrove.rollout.executor_agents"
KEY = "the-key"
_numbers = itertools.count()
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("processes"), admin_key=KEY) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, KEY) as client:
        yield client


class Played:
    """An executor on one or two processes, and plans for it."""

    def __init__(self, folder: Path, url: str, shape: Shape, start_s: float) -> None:
        self.folder, self._url = folder, url
        self.hosts: list[ProcessHost] = []
        self._start_s = start_s
        self.executor = PooledExecutor(shape.hosts * shape.places, self._host, shape)

    def _host(self) -> ProcessHost:
        self.hosts.append(ProcessHost(self._start_s))
        return self.hosts[-1]

    def plan(self, agent: str = "tree", task: dict[str, Any] | None = None, **fields: Any) -> EpisodePlan:
        """A plan whose agent tells its process in the file `told_by`."""
        number = next(_numbers)
        spec = AgentSpec("path", agent if ":" in agent else f"{HERE}:{agent}", arguments=fields.pop("arguments", {}))
        about = {"sample": 0, "attempt": 0, "session_id": f"of-processes-{number}", "server": Server(self._url, KEY)}
        data = {"told": str(self.folder / f"{number}.told"), **(task or {})}
        return EpisodePlan(**{"task": Task(f"task-{number}", data), "agent": spec, **about, **fields})

    def begin(self, plan: EpisodePlan) -> asyncio.Task[EpisodeResult]:
        return asyncio.create_task(self.executor.play(plan))

    async def told_by(self, plan: EpisodePlan) -> list[int]:
        """The ids of the process that plays, and of the one that it has started."""
        told = Path(plan.task.data["told"])
        await until(told.exists)
        return [int(name) for name in (await asyncio.to_thread(told.read_text)).split()]


Make = Callable[..., Awaitable[Played]]


@pytest.fixture
async def made(tmp_path: Path, url: str) -> AsyncIterator[Make]:
    all_made: list[Played] = []

    async def make(hosts: int = 1, places: int = 2, start_s: float = 60.0, **shape: Any) -> Played:
        played = Played(tmp_path, url, Shape(hosts, places, **shape), start_s)
        all_made.append(played)
        return played

    yield make
    (tmp_path / "go").touch()
    for played in all_made:
        await played.executor.close()


async def outcome(client: AsyncClient, plan: EpisodePlan) -> tuple[str, str | None]:
    tree = await client.session_tree(plan.session_id)
    return tree.status, tree.outcome


def is_gone(name: int) -> bool:
    try:
        return psutil.Process(name).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("then", "fate"),
    [("kill", "killed by SIGKILL"), ("exit", "ended with exit code 7")],
)
async def test_a_process_that_dies_takes_its_own_episodes_with_it_and_is_started_again(
    made: Make, client: AsyncClient, tmp_path: Path, then: str, fate: str
) -> None:
    played = await made(hosts=2)
    go = {"wait": str(tmp_path / "go")}
    beside = [played.plan(task=go) for _ in range(3)]
    playing = [played.begin(plan) for plan in beside]
    processes = [await played.told_by(plan) for plan in beside]
    dying = played.plan(task={"then": then})
    died = await played.executor.play(dying)
    assert (died.failure, died.session_id) == ("worker", dying.session_id)
    assert fate in (died.message or "")
    assert await outcome(client, dying) == ("ended", "Failed")
    gone = await played.told_by(dying)
    (tmp_path / "go").touch()
    results = await asyncio.gather(*playing)
    assert [result.failure == "worker" for result in results] == [process == gone for process in processes]
    assert sorted(str(result.failure) for result in results) == ["None", "None", "worker"]
    again = await asyncio.gather(*(played.executor.play(played.plan()) for _ in range(4)))
    assert {result.failure for result in again} == {None}


async def test_the_session_of_an_attempt_that_will_be_repeated_is_withdrawn(made: Make, client: AsyncClient) -> None:
    played = await made()
    plan = played.plan(task={"then": "segfault"}, discard=frozenset({"worker"}))
    result = await played.executor.play(plan)
    assert result.failure == "worker"
    assert "killed by SIGSEGV" in (result.message or "")
    [listed] = await client.sessions({"session_ids": [plan.session_id]})
    assert listed["withdrawn"] is True


async def test_many_episodes_play_at_once_in_few_processes(made: Make, tmp_path: Path) -> None:
    played = await made(hosts=2, places=16)
    plans = [played.plan(agent, {"wait": str(tmp_path / "go")}) for agent in ("tree", "blocking_tree") * 16]
    playing = [played.begin(plan) for plan in plans]
    processes = [(await played.told_by(plan))[0] for plan in plans]
    assert sorted(processes.count(name) for name in set(processes)) == [16, 16]
    (tmp_path / "go").touch()
    assert {result.failure for result in await asyncio.gather(*playing)} == {None}


async def test_a_process_that_hangs_while_it_imports_is_killed(made: Make, client: AsyncClient) -> None:
    played = await made(start_s=0.5)
    plans = [played.plan("tests.unit.tokengrove.rollout.hanging_agent:agent") for _ in range(3)]
    for result in await asyncio.gather(*map(played.executor.play, plans)):
        assert result.failure == "worker"
        assert "had not imported its agent within 0.5 s" in (result.message or "")


async def test_a_process_whose_event_loop_is_blocked_is_killed(made: Make, client: AsyncClient) -> None:
    played = await made(look_s=0.05, patience=10)
    blocking, beside = played.plan(task={"then": "block"}), played.plan(task={"wait": "/never"})
    for result in await asyncio.gather(played.executor.play(blocking), played.executor.play(beside)):
        assert result.failure == "worker"
        assert "the worker did not answer for 0.5 s and was killed" in (result.message or "")
    assert await outcome(client, blocking) == await outcome(client, beside) == ("ended", "Failed")
    assert is_gone((await played.told_by(blocking))[0])


async def test_a_cancelled_episode_whose_process_is_stopped_is_ended_from_here(
    made: Make, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_host, "_CANCEL_S", 0.1)
    played = await made()
    plan = played.plan(task={"wait": "/never"})
    playing = played.begin(plan)
    os.kill((await played.told_by(plan))[0], signal.SIGSTOP)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert await outcome(client, plan) == ("ended", "Failed")
    monkeypatch.setattr(process_host, "_CLOSE_S", 0.1)
    await played.executor.close()


async def test_a_thread_that_runs_on_ends_with_its_process_once_nothing_else_plays_there(
    made: Make, tmp_path: Path
) -> None:
    played = await made(look_s=0.02)
    late, beside = (
        played.plan("blocking_tree", {"wait": "/never"}, timeout_s=0.2),
        played.plan(task={"wait": str(tmp_path / "go")}),
    )
    playing = played.begin(beside)
    process = await played.told_by(beside)
    assert (await played.executor.play(late)).failure == "timeout"
    assert await played.told_by(late) == process
    (tmp_path / "go").touch()
    assert (await playing).failure is None
    await until(lambda: is_gone(process[0]))
    fresh = played.plan()
    assert (await played.executor.play(fresh)).failure is None
    assert await played.told_by(fresh) != process


async def test_a_process_with_as_many_such_threads_as_places_plays_no_more(made: Make, tmp_path: Path) -> None:
    played = await made(look_s=0.02)
    beside = played.plan(task={"wait": str(tmp_path / "go")})
    playing = played.begin(beside)
    process = await played.told_by(beside)
    for _ in range(2):
        late = played.plan("blocking_tree", {"wait": "/never"}, timeout_s=0.2)
        assert (await played.executor.play(late)).failure == "timeout"
    await until(lambda: played.executor._places._seats[0].state == "retired")
    fresh = played.plan()
    assert (await played.executor.play(fresh)).failure is None
    assert await played.told_by(fresh) != process
    assert not is_gone(process[0])
    (tmp_path / "go").touch()
    assert (await playing).failure is None
    await until(lambda: is_gone(process[0]))


async def test_an_idle_process_that_was_killed_is_replaced_with_what_it_had_started(made: Make) -> None:
    played = await made(look_s=0.02)
    plan = played.plan(task={"child": True})
    assert (await played.executor.play(plan)).failure is None
    process, child = await played.told_by(plan)
    psutil.Process(process).kill()
    await until(lambda: not played.executor._places._seats)
    await until(lambda: is_gone(child))
    assert (await played.executor.play(played.plan())).failure is None


async def test_close_ends_the_processes_and_what_they_have_started(made: Make) -> None:
    played = await made()
    plan = played.plan(task={"child": True})
    assert (await played.executor.play(plan)).failure is None
    started = await played.told_by(plan)
    await played.executor.close()
    await until(lambda: all(map(is_gone, started)))  # a process that is killed takes a moment to die


async def test_an_argument_that_cannot_be_sent_is_named(made: Make) -> None:
    played = await made()
    result = await played.executor.play(played.plan(arguments={"scale": {"lock": threading.Lock()}}))
    assert result.failure == "agent"
    assert "arguments['scale']['lock'] cannot be sent to another process" in (result.message or "")


async def test_a_system_without_room_for_a_process_fails_the_episode(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str, fd: int) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child_process, "started", refuse)
    played = await made()
    result = await played.executor.play(played.plan())
    assert result.failure == "worker"
    assert "cannot be started: [Errno 11]" in (result.message or "")


PROGRAM = """
import asyncio, sys
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task
from tokengrove.rollout.executors import ExecutorOptions, executor_for

async def main():
    url, told = sys.argv[1:]
    task = Task("killed", {"told": told, "child": True, "wait": "/never"})
    spec = AgentSpec("path", "tests.unit.tokengrove.rollout.executor_agents:tree")
    async with executor_for(ExecutorOptions("process", 2, workers=1)) as executor:
        await executor.play(EpisodePlan(task, 0, 0, Server(url, "the-key"), spec, "of-a-killed-program"))

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
async def test_a_program_that_is_killed_leaves_no_process(url: str, tmp_path: Path, stopped: bool) -> None:
    told = tmp_path / "told"
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM.replace("of-a-killed", f"of-{stopped}"), url, str(told), cwd=ROOT
    )
    await until(told.exists)
    names = [int(name) for name in (await asyncio.to_thread(told.read_text)).split()]
    if stopped:
        os.kill(names[0], signal.SIGSTOP)
    program.kill()
    await program.wait()
    await until(lambda: all(map(is_gone, names)))


SCRIPT = """
import asyncio, sys
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task
from tokengrove.rollout.executors import ExecutorOptions, executor_for

async def agent(task, session, http_client, scale):
    answer = await http_client.post(f"{session.base_url}/chat/completions", json={"messages": task["messages"]})
    answer.raise_for_status()
    return scale.value

def reward(agent_reward):
    return 2 * agent_reward

class Scale:
    def __init__(self, value):
        self.value = value

async def play(url):
    task = Task("of-a-script", {"messages": [{"role": "user", "content": "Hello"}]})
    spec = AgentSpec("path", "__main__:agent", arguments={"scale": Scale(21.0)})
    async with executor_for(ExecutorOptions("process", 2, workers=1)) as executor:
        plan = EpisodePlan(task, 0, 0, Server(url, "the-key"), spec, sys.argv[2], reward="__main__:reward")
        print(await executor.play(plan))

def main():
    asyncio.run(play(sys.argv[1]))

"""


@pytest.mark.parametrize("begins", ['if __name__ == "__main__": main()', "main()"], ids=["guarded", "unguarded"])
def test_what_a_script_defines_plays_and_rewards_in_its_processes(url: str, tmp_path: Path, begins: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + begins)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(file), url, f"of-a-script-{len(begins)}"]
    run = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert "reward=42.0" in run.stdout, run.stderr
    assert "failure=None" in run.stdout


def test_the_watchdog_kills_the_groups_that_nobody_took_back() -> None:
    assert groups(["+11\n", "+12\n", "-11\n", "+13\n", "-13\n"]) == {12}
