"""Every kind of agent plays an episode, named by its path; what is none is refused with the kinds that there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import says, serving
from tests.unit.tokengrove.kinds.kinds_of_agents import Playing, Runner, Workflow
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest, Unauthorized
from tokengrove.kinds.areal_workflow import WorkflowAgent
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task, play, resolve_agent

HERE = "tests.unit.tokengrove.kinds.kinds_of_agents"
TASK = Task("trees", {"question": "Name a tree.", "prompt": "Add 2 and 3.", "seed": 11})


@asynccontextmanager
async def connected(folder: Path, *answers: str) -> AsyncIterator[AsyncClient]:
    script = says(*(answers or ["oak"] * 8))
    async with (
        serving(folder, script, admin_key="the-key") as server,
        AsyncClient(app=server.app, admin_key="the-key") as client,
    ):
        yield client


def plan(target: str, arguments: dict[str, Any], **fields: Any) -> EpisodePlan:
    agent = AgentSpec("path", target, arguments=arguments)
    return EpisodePlan(**{"task": TASK, "sample": 0, "attempt": 0, "server": Server("http://unused"), "agent": agent,
                          "session_id": "episode", **fields})  # fmt: skip


async def played(client: AsyncClient, target: str, arguments: dict[str, Any], **fields: Any) -> EpisodeResult:
    planned = plan(target, arguments, **fields)
    agent = resolve_agent(planned.agent)
    try:
        return await play(planned, agent, client)
    finally:
        await agent.close()


@pytest.mark.parametrize(
    ("target", "arguments", "reward", "turns"),
    [
        (f"{HERE}:Calling", {"reward": 0.5}, 0.5, 1),
        (f"{HERE}:Playing", {}, 1.0, 1),
        (f"{HERE}:Areal", {"scale": 2.0}, 2.0, 1),
        (f"{HERE}:proxied", {}, 0.75, 1),
        (f"{HERE}:Workflow", {}, 0.5, 1),
        (f"{HERE}.Loop", {"bonus": 1.0}, 2.0, 1),
        ("single_turn_agent", {"config": {"actor_rollout_ref": {"rollout": {"response_length": 64}}}}, None, 1),
        (f"{HERE}:Runner", {"config": {"then": "end"}}, 0.75, 2),
        (f"{HERE}:Talk", {"config": {"bonus": 0.25}}, 0.75, 1),
        (f"{HERE}:Sessions", {"scale": 0.5}, 0.5, 1),
        ("tests.unit.tokengrove.openenv.openenv_play:AddingFactory", {"max_turns": 1}, None, 1),
        ("gem:game:GuessTheNumber-v0", {"max_steps": 2}, -0.1, 1),
    ],
)
async def test_an_agent_of_every_kind_plays(
    tmp_path: Path, target: str, arguments: dict[str, Any], reward: float | None, turns: int
) -> None:
    async with connected(tmp_path) as client:
        result = await played(client, target, arguments)
        (listed,) = await client.sessions()
    assert (result.failure, result.message, result.reward, result.turns) == (None, None, reward, turns)
    assert (listed["outcome"], listed["session_id"]) == ("Finished", "episode")


async def test_an_agent_that_can_be_closed_is(tmp_path: Path) -> None:
    before = Playing.closed
    async with connected(tmp_path) as client:
        await played(client, f"{HERE}:Playing", {})
    assert Playing.closed == before + 1


async def test_an_agent_that_cannot_be_closed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(tmp_path) as client:
        result = await played(client, f"{HERE}:Unclosable", {})
    assert result.failure is None
    assert "kinds_of_agents:Unclosable could not be closed" in caplog.text


async def test_a_workflow_that_rejects_an_episode_has_no_data(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        result = await played(client, f"{HERE}:Workflow", {}, task=Task("t", {"question": ""}))
    assert (result.failure, result.turns) == ("no_data", 0)
    assert "returned None" in str(result.message)


async def test_sampling_of_the_run_counts_in_loops_and_workflows(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        for name in ("Loop", "Workflow"):
            fields = {"session_id": name, "options": {"sampling": {"temperature": 0.25}}}
            assert (await played(client, f"{HERE}:{name}", {}, **fields)).failure is None
            shown = await client.show_turn(name, 0, ["messages"])
            assert shown["sampling"]["temperature"] == 0.25


async def test_a_loop_samples_an_episode_for_validation_by_the_settings_of_validation(tmp_path: Path) -> None:
    rollout = {"temperature": 0.75, "val_kwargs": {"temperature": 0.5}}
    config = {"config": {"actor_rollout_ref": {"rollout": rollout}}}
    async with connected(tmp_path) as client:
        for name, validation, temperature in (("trained", False, 0.75), ("measured", True, 0.5)):
            fields = {"session_id": name, "validation": validation}
            assert (await played(client, f"{HERE}:Loop", config, **fields)).failure is None
            assert (await client.show_turn(name, 0, ["messages"]))["sampling"]["temperature"] == temperature


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"n": 4}, "rollout.n=4 has no effect: --group-size says"),
        ({"val_kwargs": {"n": 4}}, "val_kwargs.n=4 has no effect: --group-size says"),
        ({"full_determinism": True}, "full_determinism=True has no effect: give --seed"),
        (
            {"enable_rollout_routing_replay": True},
            "enable_rollout_routing_replay=True has no effect: serve with --replay experts",
        ),
    ],
)
async def test_settings_of_loops_that_a_run_has_options_for_are_told(
    tmp_path: Path, rollout: dict[str, Any], told: str
) -> None:
    async with connected(tmp_path) as client:
        config = {"config": {"actor_rollout_ref": {"rollout": {**rollout, "do_sample": False}}}}
        with pytest.warns(UserWarning, match=told):
            assert (await played(client, f"{HERE}:Loop", config, session_id="greedy")).failure is None
        assert (await client.show_turn("greedy", 0, ["messages"]))["sampling"]["temperature"] == 0


async def test_a_workflow_has_no_client_with_the_admin_key(tmp_path: Path) -> None:
    class Greedy(Workflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            with pytest.raises(Unauthorized):
                await engine._session._client.sessions()
            return await super().arun_episode(engine, data)

    async with connected(tmp_path) as client:
        result = await play(plan("unused", {}), WorkflowAgent(Greedy(), "greedy"), client)
    assert (result.failure, result.message, result.turns) == (None, None, 1)


async def test_the_score_of_a_runner_is_that_of_its_episode_whatever_its_steps_add_up_to(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        result = await played(client, f"{HERE}:Runner", {"config": {"then": "disagree"}})
        nodes = (await client.session_tree("episode")).interactions
        (sample,) = {(each.score, each.reward) for each in (await client.export(session_id="episode")).samples}
    assert (result.failure, result.reward) == (None, 5.0)
    assert [node.reward for node in nodes] == [1.0, 2.0]
    assert sample == (5.0, 5.0)


async def test_a_reward_function_counts_in_place_of_the_score_of_a_runner(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        given = {"reward": "tests.unit.tokengrove.runs.run_agents:half"}
        result = await played(client, f"{HERE}:Runner", {"config": {"then": "disagree"}}, **given)
    assert (result.failure, result.reward) == (None, 0.5)


@pytest.mark.parametrize(
    ("then", "failure", "reward", "told"),
    [("fail", "agent", 0.25, "a wall"), ("nothing", "no_data", 0.0, "no reason")],
)
async def test_a_runner_that_does_not_finish_keeps_what_it_earned(
    tmp_path: Path, then: str, failure: str, reward: float | None, told: str
) -> None:
    async with connected(tmp_path) as client:
        result = await played(client, f"{HERE}:Runner", {"config": {"then": then}})
        nodes = (await client.session_tree("episode")).interactions
    assert (result.failure, result.turns) == (failure, 2)
    assert nodes[0].reward == (reward if then == "fail" else None)  # the score of a step is that of its turn
    assert result.reward == reward
    assert told in str(result.message)


async def test_a_runner_is_kept_for_the_next_episode_and_torn_down_at_the_end(tmp_path: Path) -> None:
    Runner.counts = {}
    async with connected(tmp_path) as client:
        planned = plan(f"{HERE}:Runner", {})
        agent = resolve_agent(planned.agent)
        for name in ("first", "second"):
            result = await play(plan(f"{HERE}:Runner", {}, session_id=name), agent, client)
            assert result.failure is None
        assert Runner.counts == {"setup": 1}
        await agent.close()
    assert Runner.counts == {"setup": 1, "teardown": 1}


async def test_a_runner_that_is_kept_has_the_mode_of_each_episode(tmp_path: Path) -> None:
    """A trainer measures and trains with one executor, and its runners play both."""
    Runner.modes = []
    async with connected(tmp_path) as client:
        agent = resolve_agent(plan(f"{HERE}:Runner", {}).agent)
        for number, validation in enumerate((False, True, False)):
            await play(plan("unused", {}, session_id=f"s{number}", validation=validation), agent, client)
        await agent.close()
    assert Runner.modes == ["train", "val", "train"]


async def test_a_runner_that_hangs_is_left_and_replaced(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        agent = resolve_agent(plan(f"{HERE}:Runner", {"config": {"then": "hang"}}).agent)
        Runner.hanging.clear()
        playing = asyncio.create_task(play(plan(f"{HERE}:Runner", {}), agent, client))
        await asyncio.to_thread(Runner.hanging.wait)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        Runner.released.set()
        result = await play(plan(f"{HERE}:Runner", {}, session_id="next"), agent, client)
        assert result.failure is None
        await agent.close()
        outcomes = {each["session_id"]: each["outcome"] for each in await client.sessions()}
    assert outcomes == {"episode": "Failed", "next": "Finished"}


@pytest.mark.parametrize(
    ("target", "arguments", "told"),
    [
        (f"{HERE}:Factory", {}, "is not an agent: it is the class Factory. An agent is a function"),
        (f"{HERE}:Calling", {"price": 1}, "takes no argument 'price'; it takes reward"),
        ("tests.unit.tokengrove.roll.roll_players:Player", {}, "is an environment manager of ROLL: give its YAML"),
        (f"{HERE}:Calling", {}, "needs the argument 'reward'"),
        (f"{HERE}:Areal", {"size": 1}, "takes no argument 'size'; it takes scale"),
        (f"{HERE}:Loop", {"size": 1}, "takes no argument 'size'"),
        (f"{HERE}:OfOpenEnv", {}, "is an environment of OpenEnv without MCP tools; give a factory"),
        (f"{HERE}:proxied", {"size": 1}, "is already an instance"),
        ("gem:game:GuessTheNumber-v9", {}, "there is no environment 'game:GuessTheNumber-v9': is it game:Guess"),
        ("gem:game:Hangman-v0", {"runner": "my.Runner"}, "there is no module 'my'"),
        ("tool_agnt", {}, "agent loop 'tool_agnt' is not registered; known are "),
        (f"{HERE}:Loop", {"config": "/no/such/file"}, "'config' '/no/such/file'"),
    ],
)
def test_what_is_no_agent_is_refused_before_any_episode(target: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        resolve_agent(AgentSpec("path", target, arguments=arguments))
    assert told in str(raised.value)


@pytest.mark.parametrize("name", ["NoNumber", "NoStepNumber"])
async def test_a_runner_whose_score_is_no_number_fails_and_has_no_reward(tmp_path: Path, name: str) -> None:
    async with connected(tmp_path) as client:
        result = await played(client, f"tests.unit.tokengrove.roll.roll_failing:{name}", {})
    assert (result.failure, result.reward, result.turns) == ("agent", None, 1)
    assert "run_job returned a score that is not a finite number" in str(result.message)
