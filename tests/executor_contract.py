"""What every executor does with episodes that end, fail, are cancelled, and are more than it has places for.

It needs no package of the server, so it also runs where trainers are installed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokengrove.client import AsyncClient
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task
from tokengrove.rollout.executors import Executor, ExecutorOptions, executor_for

HERE = "tests.unit.tokengrove.rollout.executor_agents"
KEY = "the-key"
PLACES = 6
_numbers = itertools.count()


def plan(url: str, agent: str = "tree", task: dict[str, Any] | None = None, **fields: Any) -> EpisodePlan:
    number = next(_numbers)
    spec = AgentSpec("path", agent if ":" in agent else f"{HERE}:{agent}")
    about = {"sample": 0, "attempt": 0, "session_id": f"episode-{number}", **fields}
    return EpisodePlan(task=Task(f"task-{number}", task or {}), server=Server(url, KEY), agent=spec, **about)


async def outcome(client: AsyncClient, played: EpisodePlan) -> tuple[str, str | None, str | None]:
    tree = await client.session_tree(played.session_id)
    return tree.status, tree.outcome, tree.extra.get("exit_reason")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` holds. Raises AssertionError after a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was not met within a minute")


class ExecutorContract:
    """Its subclasses run on one event loop per module, with the fixtures `executor` of PLACES places, `options`, with
    which it was made, and `client` and `url` of a server with the admin key KEY.
    """

    async def test_episodes_of_coroutines_and_of_blocking_functions_are_played(
        self, executor: Executor, client: AsyncClient, url: str
    ) -> None:
        plans = [plan(url, agent) for agent in ("tree", "blocking_tree") * 6]
        results = await asyncio.gather(*map(executor.play, plans))
        assert [result.reward for result in results] == [0.5, 0.25] * 6
        assert {(result.failure, result.turns) for result in results} == {(None, 1)}
        assert [result.session_id for result in results] == [each.session_id for each in plans]
        assert {(await outcome(client, each))[:2] for each in plans} == {("ended", "Finished")}

    async def test_no_more_episodes_play_at_once_than_there_are_places(
        self, executor: Executor, client: AsyncClient, url: str, tmp_path: Path
    ) -> None:
        go = tmp_path / "go"
        plans = [
            plan(url, task={"wait": str(go), "told": str(tmp_path / f"{number}.told")}) for number in range(PLACES + 3)
        ]
        playing = asyncio.gather(*map(executor.play, plans))
        await until(lambda: len(list(tmp_path.glob("*.told"))) == 6)
        ids = {each.session_id for each in plans}
        live = [row for row in await client.sessions({"status": "active"}) if row["session_id"] in ids]
        assert len(live) == PLACES
        go.touch()
        assert {result.reward for result in await playing} == {0.5}

    @pytest.mark.parametrize(("then", "text"), [("raise", "no such tree"), ("leave", "enough")])
    @pytest.mark.parametrize("agent", ["tree", "blocking_tree"])
    async def test_what_an_agent_raises_is_told_and_the_others_play_on(
        self, executor: Executor, client: AsyncClient, url: str, agent: str, then: str, text: str
    ) -> None:
        failing, *others = plans = [plan(url, agent, {"then": then}), plan(url, agent), plan(url, agent)]
        result, *played = await asyncio.gather(*map(executor.play, plans))
        assert (result.failure, result.turns) == ("agent", 1)
        assert text in (result.message or "")
        assert [each.failure for each in played] == [None] * len(others)
        assert (await outcome(client, failing))[:2] == ("ended", "Failed")

    @pytest.mark.parametrize("agent", ["tree", "blocking_tree"])
    async def test_a_cancelled_episode_ends_where_it_plays_and_the_others_play_on(
        self, executor: Executor, client: AsyncClient, url: str, tmp_path: Path, agent: str
    ) -> None:
        go, told = tmp_path / "go", tmp_path / "told"
        cancelled, other = plan(url, agent, {"wait": str(go), "told": str(told)}), plan(url, agent, {"wait": str(go)})
        playing = asyncio.create_task(executor.play(cancelled))
        beside = asyncio.create_task(executor.play(other))
        await until(told.exists)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert (await outcome(client, cancelled))[:2] == ("ended", "Failed")
        go.touch()
        assert (await beside).failure is None

    async def test_an_episode_that_is_cancelled_while_it_waits_never_starts(
        self, executor: Executor, client: AsyncClient, url: str, tmp_path: Path
    ) -> None:
        go = tmp_path / "go"
        running = [asyncio.create_task(executor.play(plan(url, task={"wait": str(go)}))) for _ in range(PLACES)]
        waiting, waits = plan(url), asyncio.Event()
        task = asyncio.create_task(executor.play(waiting))
        asyncio.get_running_loop().call_soon(waits.set)
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.touch()
        assert {(await each).failure for each in running} == {None}
        assert waiting.session_id not in {row["session_id"] for row in await client.sessions()}

    async def test_close_ends_what_plays_and_nothing_is_played_afterwards(
        self, options: ExecutorOptions, client: AsyncClient, url: str, tmp_path: Path
    ) -> None:
        executor = executor_for(options)
        plans = [
            plan(url, agent, {"wait": str(tmp_path / "never"), "told": str(tmp_path / agent)})
            for agent in ("tree", "blocking_tree")
        ]
        playing = asyncio.gather(*map(executor.play, plans))
        await until(lambda: all((tmp_path / each.agent.target.rpartition(":")[2]).exists() for each in plans))
        await executor.close()
        assert {result.failure for result in await playing} == {"cancelled"}
        assert {(await outcome(client, each))[:2] for each in plans} == {("ended", "Failed")}
        assert (await executor.play(plan(url))).failure == "cancelled"
        await executor.close()
        (tmp_path / "never").touch()  # a thread of this process ends

    async def test_the_time_of_an_agent_is_limited_where_it_plays(
        self, executor: Executor, client: AsyncClient, url: str, tmp_path: Path
    ) -> None:
        late = plan(url, "tree", {"wait": str(tmp_path / "never")}, timeout_s=0.2)
        assert (await executor.play(late)).failure == "timeout"
        assert (await outcome(client, late))[:2] == ("ended", "Timeout")

    @pytest.mark.parametrize(
        ("agent", "text"),
        [("nowhere.at:all", "there is no module 'nowhere'"), (f"{HERE}:nobody", "has no 'nobody'")],
    )
    async def test_an_agent_that_cannot_be_made_fails_its_episodes_without_a_session(
        self, executor: Executor, client: AsyncClient, url: str, agent: str, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        plans = [plan(url, agent), plan(url, agent)]
        for result in await asyncio.gather(*map(executor.play, plans)):
            assert result.failure == "agent"
            assert text in (result.message or "")
        assert (await executor.play(plan(url))).failure is None
        assert not {each.session_id for each in plans} & {row["session_id"] for row in await client.sessions()}

    async def test_a_server_that_is_not_there_fails_the_episode(self, executor: Executor) -> None:
        result = await executor.play(plan("http://127.0.0.1:9", start_timeout_s=0.0))
        assert result.failure == "server"
