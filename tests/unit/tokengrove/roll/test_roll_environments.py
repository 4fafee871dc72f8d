"""Environments of a ROLL configuration as the agent of a run: their managers play in sessions that the run starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_server
from tests.unit.tokengrove.roll.roll_runner import Runner
from tokengrove.client import AsyncClient, Client
from tokengrove.roll.episodes import EnvironmentAgent
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task, play
from tokengrove.runs import RunOptions, run_episodes
from tokengrove.runs.config import read

HERE = "tests.unit.tokengrove.roll.roll_runner"
PROXY = "roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager"


ROLL = f"""
exp_name: steps
sequence_length: 512
rollout_batch_size: 4
actor_infer: {{generating_args: {{max_new_tokens: 8}}}}
train_env_manager: {{num_env_groups: 2, group_size: 2, tags: [Steps]}}
custom_envs:
  Steps: {{env_type: steps, max_steps: 2, env_manager_cls: {PROXY}, agent_runner_cls: {HERE}.Runner}}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("server"), engine_arg=("play=agent",), admin_key="the-key") as url:
        yield url


@pytest.fixture(autouse=True)
def fresh() -> None:
    Runner.log.clear()
    Runner.hangs.clear()
    Runner.hanging.clear()


def agent_of(env: dict[str, Any] | None = None, **fields: Any) -> EnvironmentAgent:
    """An agent of one tag, `Steps`, whose `env_config` is `env`."""
    given = {"env_manager_cls": PROXY, "agent_runner_cls": f"{HERE}.Runner", "max_steps": 2, **fields}
    config = {
        "seed": 1,
        "sequence_length": 512,
        "rollout_batch_size": 2,
        "actor_infer": {"generating_args": {"max_new_tokens": 32}},
        "custom_envs": {"Steps": {"env_type": "steps", "env_config": env or {}, **given}},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Steps"]},
    }
    return EnvironmentAgent(config)


def plan_of(url: str, name: str, seed: int = 7) -> EpisodePlan:
    task = Task("Steps-0-0", {"tag": "Steps", "group_id": 0, "episode_id": 0, "seed": seed})
    return EpisodePlan(task, 0, 0, Server(url, "the-key"), AgentSpec("path", "unused"), name)


async def played(url: str, name: str, env: dict[str, Any] | None = None, **fields: Any) -> EpisodeResult:
    agent = agent_of(env, **fields)
    try:
        return await play(plan_of(url, name), agent)
    finally:
        await agent.close()


def told_of(url: str, name: str) -> dict[str, Any]:
    """What the server says of a session, and the rewards of its turns."""
    with Client(url, "the-key") as client:
        tree = client.session_tree(name)
        return {"outcome": tree.outcome, "rewards": [node.reward for node in tree.interactions]}


async def test_step_scores_reward_the_turns_in_their_order(url: str) -> None:
    result = await played(url, "scores", max_steps=3)
    assert (result.failure, result.reward, result.turns) == (None, 0.5, 3)  # the runner's score, not the sum
    assert told_of(url, "scores") == {"outcome": "Finished", "rewards": [0.0, 1.0, 2.0]}
    assert Runner.log == ["setup", "seed 7", "teardown"]


async def test_one_environment_plays_one_episode_after_another(url: str) -> None:
    agent = agent_of()
    for number in range(3):
        assert (await play(plan_of(url, f"again-{number}", seed=number), agent)).failure is None
    assert Runner.log == ["setup", "seed 0", "seed 1", "seed 2"]
    await agent.close()
    assert Runner.log[-1] == "teardown"
    assert not [each for each in threading.enumerate() if each.name == "tokengrove-Steps"]


async def test_episodes_at_once_have_an_environment_each(url: str) -> None:
    agent = agent_of()
    results = await asyncio.gather(*(play(plan_of(url, f"once-{number}"), agent) for number in range(4)))
    assert {result.reward for result in results} == {0.5}
    assert Runner.log.count("setup") == 4
    await agent.close()


@pytest.mark.parametrize(
    ("status", "failure"), [("Failed", "agent"), ("Timeout", "timeout"), ("NoData", "no_data"), ("odd", "agent")]
)
async def test_an_episode_that_its_runner_gave_up_fails_with_its_reason(url: str, status: str, failure: str) -> None:
    result = await played(url, f"ended-{status}", {"status": status})
    assert result.failure == failure and result.message is not None and "as told" in result.message
    assert told_of(url, f"ended-{status}")["outcome"] == {"odd": "Failed"}.get(status, status)


async def test_what_was_earned_before_a_runner_raised_stays(url: str) -> None:
    result = await played(url, "raised", {"raises": "the board fell"})
    assert result.failure == "agent" and result.message is not None and "the board fell" in result.message
    assert told_of(url, "raised") == {"outcome": "Failed", "rewards": [0.0, 1.0]}
    assert result.traceback is not None and "in run_job" in result.traceback
    assert (failed := result.failed) is not None
    assert (failed.type, failed.message) == ("RuntimeError", "the board fell")


async def test_a_run_of_a_yaml_whose_runner_always_fails_stops_with_the_reasons(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.yaml"
    raising = ROLL.replace(".Runner}", ".Runner, env_config: {raises: the board fell}}").replace(
        "steps\n", "falls\n", 1
    )
    path.write_text(raising + "max_failed_episodes: 3\n")
    file = read(path, given={"url": url, "admin_key": "the-key", "folder": str(tmp_path / "runs"), "concurrency": 1})
    played = await run_episodes(RunOptions(**file.values), tasks=file.tasks)
    reasons = "3 episodes in a row have failed (max_failed_episodes is 3): 3 x RuntimeError, such as task "
    assert str(played.summary.stopped).startswith(reasons) and not played.summary.succeeded
    [first, _] = [each.getMessage() for each in caplog.records if "failed: RuntimeError" in each.getMessage()]
    assert "the board fell" in first and "in run_job" in first


async def test_an_episode_that_is_cancelled_cancels_its_runner_and_frees_its_thread(url: str) -> None:
    agent = agent_of({"hangs": True})
    episode = asyncio.ensure_future(play(plan_of(url, "cancelled"), agent))
    await asyncio.to_thread(Runner.hanging.wait)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert "cancel" in Runner.log
    async with AsyncClient(url, "the-key") as client:
        assert (await client.session_tree("cancelled")).outcome == "Failed"
    await agent.close()


async def test_a_runner_that_cannot_be_made_fails_its_episode(url: str) -> None:
    result = await played(url, "unmade", agent_runner_cls=f"{HERE}.Nobody")
    assert result.failure == "agent" and result.message is not None and "Nobody" in result.message


async def test_a_direct_manager_plays_in_the_session_of_the_run(url: str) -> None:
    gem = pytest.importorskip("gem")
    gem.register("roll-environments:Counting-v0", "tests.unit.tokengrove.roll.roll_games:Counting")
    result = await played(
        url,
        "direct",
        {"length": 2},
        env_type="roll-environments:Counting-v0",
        env_manager_cls="roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager",
        agent_runner_cls=None,
        agent_template="{observation}",
        max_tokens_per_step=32,
    )
    assert (result.failure, result.reward, result.turns) == (None, 3.0, 2)


async def test_a_yaml_of_roll_is_played_as_a_run_and_its_sessions_are_samples(url: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(ROLL)
    file = read(path, given={"url": url, "admin_key": "the-key", "folder": str(tmp_path / "runs")})
    played = await run_episodes(RunOptions(**file.values), tasks=file.tasks)
    summary = played.summary
    assert (summary.done, summary.mean_reward, summary.turns) == (4, 0.5, 8)
    with Client(url, "the-key") as client:
        samples = client.export(session_ids=played.session_ids).samples
        found = client.sessions({"metadata": {"tag": "Steps", "exp_name": "steps", "mode": "train"}})
    assert len({sample.group_id for sample in samples}) == 2
    assert {each["session_id"] for each in found} == set(played.session_ids)
    assert {line for line in Runner.log if line.startswith("seed")} == {
        f"seed {task.data['seed']}" for task in file.tasks or ()
    }


async def test_the_metric_that_is_named_is_the_score_of_a_run(url: str) -> None:
    result = await played(url, "rated", env={"reward_granularity": "pass_rate"})
    assert (result.failure, result.reward) == (None, 0.25)
    assert told_of(url, "rated")["rewards"] == [0.0, 1.0]


async def test_a_metric_that_the_first_group_never_had_fails_all_episodes_from_then_on(url: str) -> None:
    agent = agent_of({"reward_granularity": "passrate"})
    results = [await play(plan_of(url, f"unrated-{number}"), agent) for number in range(3)]
    await agent.close()
    assert [result.failure for result in results] == [None, "agent", "agent"]
    for result in results[1:]:
        assert "reward_granularity of 'Steps' is 'passrate'" in str(result.message)
        assert "Metrics that were seen: pass_rate" in str(result.message)
    assert [line for line in Runner.log if line.startswith("seed")] == ["seed 7", "seed 7"]
