"""Factories of OpenEnv are kinds of agents: an episode plays them in its own session, and closes what they made."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from proxy.engine.scripted.acting import act
from tests.support import serving, tiny_renderer, user
from tests.unit.tokengrove.openenv.openenv_play import Adding, AddingFactory, Score
from tokengrove.client import AsyncClient
from tokengrove.openenv import ResourceFactoryAgent, is_resource_factory, is_session_factory
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task, play, resolve_agent


class Asking:
    """A factory of the contract whose sessions ask once for each text of their task; it keeps what it made."""

    made: ClassVar[list[Any]] = []

    def __init__(self, reward: float = 1.0) -> None:
        self._reward = reward

    def create(self, *, task: Any, rollout_id: str) -> Session:
        session = Session(task["ask"], rollout_id, self._reward)
        self.made.append(session)
        return session


class Session:
    def __init__(self, texts: list[str], rollout_id: str, reward: float) -> None:
        self.texts, self.rollout_id, self.reward = list(texts), rollout_id, reward
        self.messages: list[Any] = []
        self.closed = threading.Event()

    def next_request(self) -> dict[str, Any] | None:
        if self.texts[:1] == ["wait"]:
            self.closed.wait()
            return None
        if not self.texts:
            return None
        self.messages.append(user(self.texts.pop(0)))
        return {"messages": list(self.messages), "tools": [], "request_id": "r"}

    def deliver(self, intercept: dict[str, Any], completion_text: str) -> None:
        self.messages.append({"role": "assistant", "content": completion_text})

    def verify(self) -> Score:
        return Score(self.reward)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    Asking.made = []


def plan(agent: AgentSpec, data: dict[str, Any], **more: Any) -> EpisodePlan:
    return EpisodePlan(Task("t", data), 0, 0, Server("http://t"), agent, "episode-1", **more)


async def played(folder: Path, agent: AgentSpec, data: dict[str, Any], **more: Any) -> tuple[EpisodeResult, Any]:
    """The result of an episode, and the tree of its session."""
    script = act(tiny_renderer())
    async with serving(folder, script) as server, AsyncClient(app=server.app) as client:
        made = resolve_agent(agent)
        result = await play(plan(agent, data, **more), made, client)
        await made.close()
        return result, await client.session_tree("episode-1")


async def test_a_factory_of_the_contract_plays_in_the_session_of_its_episode(tmp_path: Path) -> None:
    agent = AgentSpec("path", f"{__name__}:Asking", arguments={"reward": 0.5})
    result, tree = await played(tmp_path, agent, {"ask": ["Say exactly: one", "Say exactly: two"]})
    assert (result.reward, result.failure, result.turns) == (0.5, None, 2)
    assert [turn.reason for turn in tree.interactions] == ["first", "continued"]
    [session] = Asking.made
    assert session.rollout_id == "episode-1" and session.closed.is_set()
    assert [message["content"] for message in session.messages] == [
        *("Say exactly: one", "one", "Say exactly: two", "two")
    ]


async def test_an_episode_that_takes_too_long_closes_its_session(tmp_path: Path) -> None:
    agent = AgentSpec("path", f"{__name__}:Asking")
    result, tree = await played(tmp_path, agent, {"ask": ["Say exactly: one", "wait"]}, timeout_s=0.2)
    assert (result.failure, tree.outcome) == ("timeout", "Timeout")
    assert Asking.made[0].closed.is_set()


async def test_a_factory_that_fails_fails_its_episode(tmp_path: Path) -> None:
    result, tree = await played(tmp_path, AgentSpec("path", f"{__name__}:Asking"), {"no": "such field"})
    assert (result.failure, tree.outcome) == ("agent", "Failed")
    assert "KeyError" in tree.extra["exit_reason"]


async def test_an_environment_of_openenv_is_played_by_the_react_harness(tmp_path: Path) -> None:
    agent = AgentSpec("path", "tests.unit.tokengrove.openenv.openenv_play:AddingFactory")
    result, tree = await played(tmp_path, agent, {"prompt": "What is 3 plus 4?"})
    assert (result.reward, result.failure, result.turns) == (7.0, None, 2)
    assert [turn.reason for turn in tree.interactions] == ["first", "continued"]


async def test_an_environment_is_closed_whatever_becomes_of_its_episode(tmp_path: Path) -> None:
    factory = AddingFactory()
    async with serving(tmp_path, act(tiny_renderer())) as server, AsyncClient(app=server.app) as client:
        agent = AgentSpec("path", "unused")
        broken = {"prompt": "What is 3 plus 4?", "broken": True}
        result = await play(plan(agent, broken), ResourceFactoryAgent(factory), client)
    assert result.failure == "agent" and "the environment is gone" in str(result.message)
    assert [made.closed for made in factory.made] == [1]


async def test_what_is_made_while_an_episode_is_cancelled_is_closed(tmp_path: Path) -> None:
    begun, may_end, made = threading.Event(), threading.Event(), []

    def environment(task: Any) -> Adding:
        begun.set()
        may_end.wait()
        made.append(Adding(task))
        return made[0]

    async with serving(tmp_path, act(tiny_renderer())) as server, AsyncClient(app=server.app) as client:
        playing = asyncio.create_task(
            play(plan(AgentSpec("path", "unused"), {"prompt": "hi"}), ResourceFactoryAgent(environment), client)
        )
        await asyncio.to_thread(begun.wait)
        playing.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert made[0].closed == 1
        assert (await client.session_tree("episode-1")).outcome == "Failed"


def test_factories_are_known_by_what_create_takes() -> None:
    class Neither:
        def create(self, name: str) -> None: ...

    assert is_session_factory(Asking) and is_session_factory(Asking())
    assert not is_session_factory(AddingFactory) and is_resource_factory(AddingFactory)
    assert not any(
        known(found) for known in (is_session_factory, is_resource_factory) for found in (Neither, play, None)
    )
