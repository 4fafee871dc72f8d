"""AReaL's workflow: what agents are given, what they may return, and what is left when they fail."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, OpenAI, PermissionDeniedError

from proxy.app import build_app
from proxy.settings import Settings
from tests.support import default_url, real_server, shared_renderer, until, user
from tests.unit.tokengrove.rollout.agents_of_processes import Asks, KeepsClient
from tokengrove.areal import GroupedRolloutWorkflow, OpenAIProxyWorkflow
from tokengrove.client import AsyncClient, Client, ServerUnreachable
from tokengrove.client.values import SessionTree
from tokengrove.errors import InvalidRequest, NotFound, TooManyRequests, Unauthorized
from tokengrove.rollout.environment import PLACEHOLDER
from tokengrove.rollout.failures import AgentFailed, WorkerDied
from tokengrove.rollout.processes import shared_pool

KEY = "a-key-of-the-administrator"
Run = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with an admin key on which a start needs a grant; two are left over."""
    folder = tmp_path_factory.mktemp("keyed")
    with real_server(folder, engine_arg=("tokens=4",), admin_key=KEY, capacity_control=True) as url:
        with Client(url, KEY) as client:
            client.grant_capacity(2)
        yield url


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("opened"), engine_arg=("tokens=4",)) as url:
        yield url


class Agent:
    """An agent that calls the model `turns` times in one conversation and returns `result`."""

    def __init__(self, result: Any = 1.0, turns: int = 1) -> None:
        self.result, self.turns, self.ids, self.extra = result, turns, list[str](), dict[str, Any]()

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        self.extra = extra
        client = AsyncOpenAI(base_url=extra["base_url"], http_client=extra["http_client"], max_retries=0)
        messages = list(data["messages"])
        for _ in range(self.turns):
            reply = await client.chat.completions.create(model="default", messages=messages)
            self.ids.append(reply.id)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, user("And then?")]
        return self.result(self.ids) if callable(self.result) else self.result


class Of:
    """An agent whose `run` is a given function."""

    def __init__(self, run: Run) -> None:
        self.run = run


DATA = {"messages": [user("Hello")], "task_id": "areal"}


async def run(url: str, agent: Any, **options: Any) -> Any:
    return await OpenAIProxyWorkflow("inline", agent, url, KEY, **options).arun_episode(None, DATA)


async def tree(url: str, session_id: str) -> SessionTree:
    async with AsyncClient(url, KEY) as client:
        return await client.session_tree(session_id)


async def capacity(url: str) -> int:
    """How many sessions may start; asked by granting one more, which is taken back by a session that does not fail."""
    async with AsyncClient(url, KEY) as client:
        left = await client.grant_capacity(1)
        async with client.session("count"):
            return left - 1


def fresh() -> str:
    fresh.count += 1  # type: ignore[attr-defined]
    return f"episode-{fresh.count}"  # type: ignore[attr-defined]


fresh.count = 0  # type: ignore[attr-defined]


async def test_a_float_is_the_reward_of_the_last_turn(keyed: str) -> None:
    agent = Agent(0.5, turns=3)
    interactions = await run(keyed, agent, discount=0.5)
    assert list(interactions) == agent.ids
    assert [interaction.reward for interaction in interactions.values()] == [0.125, 0.25, 0.5]


async def test_a_dict_rewards_each_turn_by_its_id(keyed: str) -> None:
    interactions = await run(keyed, Agent(lambda ids: {ids[0]: 2.0, ids[1]: -1}, turns=2), discount=0.0)
    assert [interaction.reward for interaction in interactions.values()] == [2.0, -1.0]


async def test_any_text_may_be_the_task(keyed: str) -> None:
    workflow = OpenAIProxyWorkflow("inline", Agent(), keyed, KEY)
    (interaction,) = (await workflow.arun_episode(None, {**DATA, "task_id": "What is 2/3 of ½?" * 9}) or {}).values()
    assert (await tree(keyed, str(interaction.session_id))).task_id == "What is 2/3 of ½?" * 9
    assert str(interaction.session_id).startswith("What-is-2-3-of-What")


@pytest.mark.parametrize("result", [None, {}])
async def test_without_rewards_the_turns_come_back(keyed: str, result: Any) -> None:
    (interaction,) = (await run(keyed, Agent(result))).values()
    assert interaction.original_reward is None


@pytest.mark.parametrize(
    ("result", "reward"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0), (np.array(0.25), 0.25)],
)
async def test_every_kind_of_number_is_a_reward(keyed: str, result: Any, reward: float) -> None:
    (interaction,) = (await run(keyed, Agent(result))).values()
    assert interaction.reward == reward


@pytest.mark.parametrize(
    ("result", "error", "told"),
    [
        ("1.0", TypeError, "Agent.run returned '1.0' of type str"),
        ([1.0], TypeError, r"of type list; return a float"),
        (float("nan"), ValueError, "finite"),
        ({"id": float("inf")}, ValueError, "a dict in which 'id' has the reward inf; a reward must be"),
        ({1: 1.0}, TypeError, "the key 1"),
        ({"chatcmpl-of-nobody": 1.0}, NotFound, "chatcmpl-of-nobody"),
    ],
)
async def test_a_result_that_is_no_reward_fails_the_episode(
    keyed: str, result: Any, error: type[Exception], told: str
) -> None:
    before, session_id = await capacity(keyed), fresh()
    with pytest.raises(error, match=told):
        await run(keyed, Agent(result), session_id=session_id)
    shown = await tree(keyed, session_id)
    assert (shown.status, shown.outcome) == ("ended", "Failed")
    assert shown.extra["exit_reason"].startswith(f"{error.__name__}: ")
    assert await capacity(keyed) == before


async def test_an_agent_gets_its_addresses_and_key_and_no_other_key(keyed: str) -> None:
    agent = Agent()
    await run(keyed, agent, session_id=(session_id := fresh()))
    extra = {name: value for name, value in agent.extra.items() if name != "http_client"}
    assert extra.keys() == {"base_url", "api_key"}
    assert extra["base_url"].startswith(f"{keyed}/{session_id}~")
    assert extra["api_key"].startswith("sk-")
    assert agent.extra["http_client"].is_closed


async def test_an_agent_that_names_its_arguments_gets_only_these(opened: str) -> None:
    told = []

    async def data_alone(data: dict[str, Any]) -> float:
        told.append(data)
        return 1.0

    async def two(data: dict[str, Any], *, base_url: str, api_key: str, mine: int = 3) -> None:
        told.append((base_url[:4], api_key[:3], mine))

    assert await run(opened, Of(data_alone)) is None
    assert await run(opened, Of(two)) is None
    assert told == [DATA, ("http", "sk-", 3)]


@pytest.mark.parametrize("set_to", [None, "", "sk-of-somebody-else"])
async def test_the_openai_sdk_starts_whatever_key_the_process_has(
    opened: str, keyed: str, monkeypatch: pytest.MonkeyPatch, set_to: str | None
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OPENAI_API_KEY", set_to)
    seen = set()

    def look(_: Any) -> float:
        seen.add(os.environ.get("OPENAI_API_KEY"))
        return 1.0

    await asyncio.gather(*(run(url, Agent(look, turns)) for url in (opened, keyed) for turns in (1, 3)))
    assert seen == {set_to or PLACEHOLDER}
    assert os.environ.get("OPENAI_API_KEY") == set_to


async def test_a_key_that_is_set_during_an_episode_stays(opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")

    def set_key(_: Any) -> float:
        os.environ["OPENAI_API_KEY"] = "chosen"
        return 1.0

    await run(opened, Agent(set_key))
    assert os.environ["OPENAI_API_KEY"] == "chosen"


async def test_the_servers_address_with_the_sessions_key_works_too(keyed: str) -> None:
    async def as_areal_1_0_4(data: dict[str, Any], **extra: Any) -> float:
        async with AsyncOpenAI(base_url=keyed, api_key=extra["api_key"], http_client=extra["http_client"]) as client:
            await client.chat.completions.create(model="default", messages=data["messages"])
        return 1.0

    (interaction,) = (await run(keyed, Of(as_areal_1_0_4))).values()
    assert interaction.reward == 1.0


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_one_address_is_for_the_sdks_of_all_apis(keyed: str, api: str) -> None:
    async def agent(data: dict[str, Any], *, base_url: str, api_key: str) -> dict[str, float]:
        if api == "messages":
            async with AsyncAnthropic(base_url=base_url, api_key=api_key) as claude:
                message = await claude.messages.create(model="default", max_tokens=8, messages=data["messages"])
            return {message.id: 0.5}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            if api == "responses":
                return {(await client.responses.create(model="default", input="Hello")).id: 0.5}
            return {(await client.chat.completions.create(model="default", messages=data["messages"])).id: 0.5}

    (interaction,) = (await run(keyed, Of(agent))).values()
    assert interaction.reward == 0.5


async def test_blocking_agents_run_in_threads_side_by_side(keyed: str) -> None:
    together = threading.Barrier(2, timeout=60)

    def blocking(data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        together.wait()
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="default", messages=data["messages"])
        return 0.5

    class Blocking:
        run = staticmethod(blocking)

    for interactions in await asyncio.gather(run(keyed, Blocking()), run(keyed, Blocking())):
        assert [interaction.reward for interaction in interactions.values()] == [0.5]


async def test_an_agent_without_calls_has_nothing_to_train(keyed: str, caplog: pytest.LogCaptureFixture) -> None:
    async def lazy(data: dict[str, Any]) -> float:
        return 1.0

    before, session_id = await capacity(keyed), fresh()
    assert await run(keyed, Of(lazy), session_id=session_id) is None
    assert (await tree(keyed, session_id)).outcome == "NoData"
    assert f"made no call: there is nothing to train (task areal, session {session_id})" in caplog.text
    assert await capacity(keyed) == before


class Broken(Exception):
    """What an agent raises."""


async def raises(data: dict[str, Any], **extra: Any) -> None:
    await Agent().run(data, **extra)
    raise Broken("no tool")


async def leaves(data: dict[str, Any], **extra: Any) -> None:
    raise SystemExit(3)


async def cancels_itself(data: dict[str, Any], **extra: Any) -> None:
    raise asyncio.CancelledError


async def hangs(data: dict[str, Any], **extra: Any) -> None:
    await Agent().run(data, **extra)
    await asyncio.Event().wait()


async def waits_too_short(data: dict[str, Any], **extra: Any) -> None:
    raise TimeoutError("of the agent's own")


@pytest.mark.parametrize(
    ("agent", "timeout_s", "error", "reason"),
    [
        (raises, None, Broken, "Broken: no tool"),
        (leaves, None, AgentFailed, "AgentFailed: SystemExit: 3"),
        (cancels_itself, None, AgentFailed, "AgentFailed: CancelledError: the agent was cancelled from inside"),
        (hangs, 0.2, TimeoutError, "TimeoutError: Of.run has not ended within 0.2 s (timeout_s)"),
        (waits_too_short, 60.0, TimeoutError, "TimeoutError: of the agent's own"),
    ],
)
async def test_an_agent_that_fails_leaves_a_failed_session_and_the_capacity(
    keyed: str, agent: Run, timeout_s: float | None, error: type[Exception], reason: str
) -> None:
    before, session_id = await capacity(keyed), fresh()
    with pytest.raises(error):
        await run(keyed, Of(agent), session_id=session_id, timeout_s=timeout_s)
    shown = await tree(keyed, session_id)
    assert (shown.status, shown.outcome, shown.extra["exit_reason"]) == ("ended", "Failed", reason)
    assert await capacity(keyed) == before


async def test_an_episode_that_is_cancelled_leaves_a_failed_session_and_the_capacity(keyed: str) -> None:
    running = asyncio.Event()

    async def agent(data: dict[str, Any], **extra: Any) -> None:
        running.set()
        await asyncio.Event().wait()

    before, session_id = await capacity(keyed), fresh()
    episode = asyncio.create_task(run(keyed, Of(agent), session_id=session_id))
    await running.wait()
    episode.cancel()
    await asyncio.sleep(0)
    episode.cancel()  # impatient
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert (await tree(keyed, session_id)).outcome == "Failed"
    assert await capacity(keyed) == before


async def test_a_start_that_is_refused_leaves_the_capacity(tmp_path: Path) -> None:
    with real_server(tmp_path, admin_key=KEY, capacity_control=True, max_live_sessions=1) as url:
        async with AsyncClient(url, KEY) as client:
            await client.grant_capacity(1)
            async with client.session("other"):
                with pytest.raises(TooManyRequests, match="--max-live-sessions"):
                    await run(url, Agent(), start_timeout_s=0.0)
        assert await capacity(url) == 0


async def test_without_a_grant_of_its_own_an_episode_takes_one_that_is_there(tmp_path: Path) -> None:
    with real_server(tmp_path, engine_arg=("tokens=4",), admin_key=KEY, capacity_control=True) as url:
        with pytest.raises(TooManyRequests, match="--capacity-control"):
            await run(url, Agent(), grant_capacity=False, start_timeout_s=0.0)
        async with AsyncClient(url, KEY) as client:
            await client.grant_capacity(1)
        with pytest.raises(Broken):
            await run(url, Of(raises), grant_capacity=False)
        assert await run(url, Agent(), grant_capacity=False)
        assert await capacity(url) == 0


@pytest.mark.parametrize("step", ["reward", "end", "export"])
async def test_a_step_that_the_server_refuses_leaves_the_capacity(keyed: str, step: str) -> None:
    before, session_id = await capacity(keyed), fresh()

    async def agent(data: dict[str, Any], **extra: Any) -> float | None:
        await Agent().run(data, **extra)
        if step != "export":
            async with AsyncClient(keyed, KEY) as client:
                await client.delete_session(session_id)
        return 1.0 if step == "reward" else None

    workflow = OpenAIProxyWorkflow("inline", Of(agent), keyed, KEY, session_id=session_id)
    workflow.discount = 2.0
    with pytest.raises(InvalidRequest if step == "export" else Unauthorized):
        await workflow.arun_episode(None, DATA)
    assert await capacity(keyed) == before


async def run_in_process(url: str, then: str, **options: Any) -> Any:
    workflow = OpenAIProxyWorkflow("subproc", Asks(then), url, KEY, subproc_max_workers=2, **options)
    return await workflow.arun_episode(None, DATA)


@pytest.fixture(scope="module", autouse=True)
def no_processes_left() -> Iterator[None]:
    yield
    shared_pool(2).close()


@pytest.mark.wide
async def test_agents_in_processes_each_have_their_own_session(
    keyed: str, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/of-somebody-else")
    before, group = dict(os.environ), fresh()
    urls = [keyed, opened] * 3
    results = await asyncio.gather(*(run_in_process(url, "return", group_id=group) for url in urls))
    assert [[interaction.reward for interaction in result.values()] for result in results] == [[0.5]] * 6
    assert len({interaction.session_id for result in results for interaction in result.values()}) == 6
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("then", "timeout_s", "error", "reason"),
    [
        ("error", None, AgentFailed, "AgentFailed: openai.BadRequestError: Error code: 400"),
        ("exit", None, WorkerDied, "WorkerDied: the process ended with exit code 7"),
        ("hang", 0.5, TimeoutError, "TimeoutError: Asks.run has not ended within 0.5 s (timeout_s)"),
    ],
)
async def test_an_agent_that_fails_in_its_process_leaves_a_failed_session_and_the_capacity(
    keyed: str, then: str, timeout_s: float | None, error: type[Exception], reason: str
) -> None:
    before, session_id = await capacity(keyed), fresh()
    other = asyncio.create_task(run_in_process(keyed, "return"))
    with pytest.raises(error):
        await run_in_process(keyed, then, session_id=session_id, timeout_s=timeout_s)
    shown = await tree(keyed, session_id)
    assert (shown.status, shown.outcome) == ("ended", "Failed")
    assert shown.extra["exit_reason"].startswith(reason)
    assert await other
    assert await capacity(keyed) == before


async def test_an_episode_that_is_cancelled_in_its_process_leaves_a_failed_session(keyed: str, tmp_path: Path) -> None:
    session_id, told = fresh(), tmp_path / "told"
    workflow = OpenAIProxyWorkflow("subproc", Asks("hang"), keyed, KEY, subproc_max_workers=2, session_id=session_id)
    episode = asyncio.create_task(workflow.arun_episode(None, {**DATA, "told": str(told)}))
    await until(told.exists)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert (await tree(keyed, session_id)).outcome == "Failed"
    assert await run_in_process(keyed, "return")


async def test_agents_of_a_process_may_share_a_client_and_nothing_else(keyed: str) -> None:
    workflow = OpenAIProxyWorkflow("subproc", KeepsClient(), keyed, KEY, subproc_max_workers=1)
    async with workflow:
        for _ in range(3):
            interactions = await workflow.arun_episode(None, DATA)
            assert interactions is not None
            assert [turn.reward for turn in interactions.values()] == [0.0]  # no task of another episode runs


async def test_what_cannot_be_sent_to_a_process_is_named(keyed: str) -> None:
    agent, session_id = Agent(lambda ids: 1.0), fresh()
    workflow = OpenAIProxyWorkflow("subproc", agent, keyed, KEY, subproc_max_workers=2, session_id=session_id)
    with pytest.raises(TypeError, match=r"agent\.result cannot be sent"):
        await workflow.arun_episode(None, DATA)
    assert (await tree(keyed, session_id)).outcome == "Failed"
    workflow = OpenAIProxyWorkflow("subproc", Asks(), keyed, KEY, subproc_max_workers=2)
    with pytest.raises(TypeError, match=r"data\['tool'\] cannot be sent"):
        await workflow.arun_episode(None, {**DATA, "tool": threading.Lock()})


async def test_an_evaluation_is_marked_and_left_out_of_exports(opened: str) -> None:
    group = fresh()
    assert await run(opened, Agent(), is_eval=True, group_id=group, metadata={"step": 3})
    assert await run(opened, Agent(), group_id=group)
    async with AsyncClient(opened) as client:
        export = await client.export(filter={"group_id": group})
        measured = await client.export(filter={"group_id": group, "validation": "only", "metadata": {"step": 3}})
    assert len(export.samples) == len(measured.samples) == 1
    assert export.sessions.keys() != measured.sessions.keys()


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ServerUnreachable, match="is the server running"):
        await run("http://127.0.0.1:9", Agent(), start_timeout_s=0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"mode": "threads"}, ValueError, "Must be 'inline', 'subproc', or 'online'"),
        ({"agent": None}, ValueError, "agent is required"),
        ({"agent": object()}, TypeError, "callable 'run'"),
        ({"agent": Agent}, TypeError, "the class Agent"),
        ({"proxy_addr": "127.0.0.1:8080"}, ValueError, "http://"),
        ({"discount": 2.0}, ValueError, "discount is 2.0"),
        ({"timeout_s": 0}, ValueError, "timeout_s is 0"),
        ({"start_timeout_s": -1}, ValueError, "start_timeout_s is -1"),
        ({"client": AsyncClient("http://127.0.0.1:9")}, ValueError, "client has an address"),
        ({"export_style": "tree"}, ValueError, "'tree'; the styles are individual and concat"),
        ({"filter": {"task_id": "t"}}, ValueError, "mode 'inline' starts its own"),
        ({"group": "g"}, TypeError, "no argument 'group'"),
    ],
)
def test_arguments_that_make_no_workflow_are_refused(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        OpenAIProxyWorkflow(**{"mode": "inline", "agent": Agent(), "proxy_addr": "http://h", **arguments})


async def test_agents_reach_an_application_in_this_process(tmp_path: Path) -> None:
    settings = Settings(engine="scripted", engine_arg=("tokens=4",), database_url=default_url(tmp_path))
    with shared_renderer(settings):
        app = build_app(settings)
    async with AsyncClient(app=app) as client:
        workflow = OpenAIProxyWorkflow("inline", Agent(0.5, turns=2), client=client, discount=0.5)
        interactions = await GroupedRolloutWorkflow(workflow, 3).arun_episode(None, DATA)
        assert interactions is not None
        assert sorted(turn.reward for turn in interactions.values()) == [0.25] * 3 + [0.5] * 3
        with pytest.raises(ValueError, match="cannot reach an application in this one"):
            OpenAIProxyWorkflow("subproc", Agent(), client=client)


async def test_a_blocking_agent_that_takes_too_long_loses_its_session(keyed: str) -> None:
    go_on, refused, session_id = threading.Event(), threading.Event(), fresh()

    class Blocking:
        def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> None:
            go_on.wait()
            with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                try:
                    client.chat.completions.create(model="default", messages=data["messages"])
                except PermissionDeniedError:
                    refused.set()

    with pytest.raises(TimeoutError, match=r"Blocking\.run has not ended within 0\.1 s"):
        await run(keyed, Blocking(), timeout_s=0.1, session_id=session_id)
    assert (await tree(keyed, session_id)).outcome == "Failed"
    go_on.set()
    assert await asyncio.to_thread(refused.wait, 60)
