"""Groups of episodes, and what a trainer may give as its workflow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from tests.support import real_server, user
from tokengrove.areal import GroupedRolloutWorkflow, OpenAIProxyWorkflow, RolloutWorkflow, resolve_workflow
from tokengrove.areal.grouped import GroupResult
from tokengrove.client import AsyncClient
from tokengrove.rollout.failure_log import TooManyFailedEpisodes
from tokengrove.rollout.failures import AgentFailed

DATA = {"messages": [user("Hello")], "task_id": "grouped"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("groups"), engine_arg=("tokens=4",)) as url:
        yield url


class Agent:
    """Asks the model once; its episodes return their numbers. Those in `failing` raise, those in `lazy` ask nothing."""

    def __init__(self, failing: tuple[int, ...] = (), lazy: tuple[int, ...] = ()) -> None:
        self.failing, self.lazy, self.begun = failing, lazy, 0

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        number, self.begun = self.begun, self.begun + 1
        if number in self.failing:
            raise KeyError(f"episode {number}")
        if number not in self.lazy:
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                await client.chat.completions.create(model="default", messages=data["messages"])
        return float(number)


@pytest.mark.parametrize(("options", "most"), [({}, 12), ({"max_failed_episodes": 5}, 5)])
async def test_a_run_in_which_every_episode_fails_ends_with_the_reasons(
    url: str, caplog: pytest.LogCaptureFixture, options: dict[str, int], most: int
) -> None:
    workflow = OpenAIProxyWorkflow("inline", Agent(failing=tuple(range(0, 99, 2)), lazy=tuple(range(1, 99, 2))), url)
    grouped, raised = GroupedRolloutWorkflow(workflow, 4, **options), 0
    with pytest.raises(TooManyFailedEpisodes, match=r"^\d+ episodes in a row have failed") as caught:
        for _ in range(4):
            try:
                await grouped.arun_episode(None, DATA)
            except KeyError:
                raised += 1
    assert most <= int(str(caught.value).split()[0]) < most + 4  # the others of the group ended meanwhile
    assert raised == most // 4 - (most % 4 == 0) and caught.value.counts.keys() == {"KeyError", "NoTurns"}
    assert "Agent.run made no call" in str(caught.value) and "task grouped, session grouped-" in str(caught.value)
    [told] = [each.getMessage() for each in caplog.records if "failed: KeyError: 'episode" in each.getMessage()]
    assert "Traceback" in told and "session grouped-" in told


async def test_a_group_says_how_many_of_its_episodes_have_failed(url: str) -> None:
    found = await group(url, Agent(failing=(1,), lazy=(3,)))
    assert isinstance(found, GroupResult) and (found.episodes, found.failed_episodes) == (4, 2)


async def test_one_episode_after_the_other_ends_the_run_and_a_success_begins_the_count_anew(url: str) -> None:
    workflow = OpenAIProxyWorkflow("inline", Agent(failing=(0, 1, 3, 4, 5)), url)
    for error in (KeyError, KeyError, None, KeyError, KeyError, TooManyFailedEpisodes):
        if error is None:
            assert await workflow.arun_episode(None, DATA)
            continue
        with pytest.raises(error):
            await workflow.arun_episode(None, DATA)
    assert (workflow.failures.episodes, workflow.failures.total) == (6, 5)


class Rejects(RolloutWorkflow):
    """A workflow of a trainer's own: it raises, or has no result."""

    begun = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        self.begun += 1
        if self.begun % 2:
            raise ValueError("no luck")
        return None


async def test_workflows_of_others_are_counted_too() -> None:
    grouped = GroupedRolloutWorkflow(Rejects(), 2, max_failed_episodes=4)
    with pytest.raises(ValueError, match="no luck"):
        await grouped.arun_episode(None, DATA)
    with pytest.raises(TooManyFailedEpisodes) as caught:
        await grouped.arun_episode(None, DATA)
    assert caught.value.counts == {"ValueError": 2, "NoResult": 2}


class Tensors(RolloutWorkflow):
    """Returns tensors of 1, 2, ... columns."""

    def __init__(self, first: int = 1) -> None:
        self.columns = first

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        columns, self.columns = self.columns, self.columns + 1
        return {"input_ids": torch.full((1, columns), columns), "rewards": torch.tensor([1.0]), "names": [str(columns)]}


async def group(url: str, agent: Agent, **options: Any) -> dict[str, Any] | None:
    return await GroupedRolloutWorkflow(OpenAIProxyWorkflow("inline", agent, url), 4, **options).arun_episode(
        None, DATA
    )


async def sessions(url: str, interactions: dict[str, Any]) -> list[dict[str, Any]]:
    """The sessions of the group of these interactions."""
    async with AsyncClient(url) as client:
        listed = await client.sessions()
    names = {interaction.session_id for interaction in interactions.values()}
    (group_id,) = {entry["group_id"] for entry in listed if entry["session_id"] in names}
    return [entry for entry in listed if entry["group_id"] == group_id]


async def test_the_episodes_of_a_group_are_merged_and_have_a_group_id(url: str) -> None:
    interactions = await group(url, Agent())
    assert interactions is not None
    assert sorted(interaction.reward for interaction in interactions.values()) == [0.0, 1.0, 2.0, 3.0]
    assert len(await sessions(url, interactions)) == 4
    other = await group(url, Agent())
    assert other is not None
    assert len(await sessions(url, other)) == 4


async def test_an_episode_that_fails_or_does_nothing_is_left_out(url: str, caplog: pytest.LogCaptureFixture) -> None:
    interactions = await group(url, Agent(failing=(1,), lazy=(2,)))
    assert interactions is not None
    assert sorted(interaction.reward for interaction in interactions.values()) == [0.0, 3.0]
    assert "2/4 trajectories returned None or failed" in caplog.text
    assert "KeyError: 'episode 1'" in caplog.text
    outcomes = sorted(str(entry["outcome"]) for entry in await sessions(url, interactions))
    assert outcomes == ["Failed", "NoData", "None", "None"]


async def test_a_group_without_results_is_none_or_its_first_failure(url: str) -> None:
    assert await group(url, Agent(lazy=(0, 1, 2, 3))) is None
    with pytest.raises(KeyError, match=r"episode [12]"):  # whichever of the two began first
        await group(url, Agent(failing=(1, 2), lazy=(0, 3)), logger=logging.getLogger("mine"))


async def test_a_failure_may_end_the_group(url: str) -> None:
    ended = []

    class Waits(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            if data.setdefault("episodes", []) == []:
                data["episodes"].append(1)
                await asyncio.sleep(0)
                raise KeyError("the first")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    with pytest.raises(KeyError, match="the first"):
        await GroupedRolloutWorkflow(Waits(), 3, on_failure="raise").arun_episode(None, {})
    assert ended == [True, True]


async def test_tensors_are_padded_and_put_below_each_other() -> None:
    joined = await GroupedRolloutWorkflow(Tensors(), 3).arun_episode(None, {})
    assert joined is not None
    assert joined["input_ids"].tolist() == [[1, 0, 0], [2, 2, 0], [3, 3, 3]]
    assert joined["rewards"].tolist() == [1.0, 1.0, 1.0]
    assert joined["names"] == ["1", "2", "3"]


def test_a_group_of_none_and_another_word_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size must be >= 1"):
        GroupedRolloutWorkflow(Tensors(), 0)
    with pytest.raises(ValueError, match="'drop' or 'raise'"):
        GroupedRolloutWorkflow(Tensors(), 2, on_failure="ignore")  # type: ignore[arg-type]


HERE = "tests.unit.tokengrove.areal.test_areal_groups"
AGENT = Agent(lazy=(0,))
WORKFLOW = Tensors(first=5)
ALIAS = f"{HERE}:AGENT"


class Theirs:
    """A workflow of another system."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


@pytest.mark.parametrize(
    "workflow", [AGENT, f"{HERE}.AGENT", f"{HERE}:AGENT", f"{HERE}.ALIAS"], ids=["instance", "dotted", "colon", "alias"]
)
def test_an_agent_is_wrapped(workflow: Any, caplog: pytest.LogCaptureFixture) -> None:
    resolved = resolve_workflow(workflow, None, 1, "http://h", discount=0.9, export_style="concat")
    assert isinstance(resolved, OpenAIProxyWorkflow)
    assert resolved.agent.lazy == (0,)
    assert (resolved.proxy_addr, resolved.discount, resolved.export_style) == ("http://h", 0.9, "concat")
    assert not caplog.records


@pytest.mark.parametrize("workflow", [Agent, f"{HERE}.Agent", f"{HERE}:Agent"])
def test_a_class_of_an_agent_is_called_with_the_arguments(workflow: Any) -> None:
    resolved = resolve_workflow(workflow, {"failing": (3,)}, proxy_addr="http://h")
    assert resolved.agent.failing == (3,)
    assert resolve_workflow(workflow, proxy_addr="http://h").agent.failing == ()


@pytest.mark.parametrize("workflow", [Tensors, f"{HERE}:Tensors"])
def test_a_class_of_a_workflow_is_called_with_the_arguments(workflow: Any) -> None:
    assert resolve_workflow(workflow, {"first": 3}).columns == 3


@pytest.mark.parametrize("workflow", [WORKFLOW, f"{HERE}:WORKFLOW", Theirs()], ids=["instance", "name", "other"])
def test_a_workflow_is_used_as_it_is(workflow: Any, caplog: pytest.LogCaptureFixture) -> None:
    resolved = resolve_workflow(workflow, {"first": 3})
    assert not isinstance(resolved, OpenAIProxyWorkflow)
    assert "workflow_kwargs is ignored" in caplog.text


def test_a_group_size_above_one_makes_a_group() -> None:
    assert isinstance(resolve_workflow(WORKFLOW, group_size=2), GroupedRolloutWorkflow)
    assert resolve_workflow(WORKFLOW, group_size=1) is not None


@pytest.mark.parametrize(
    ("workflow", "told"),
    [
        ("Agent", "Failed to import workflow from string 'Agent'"),
        (f"{HERE}.Agend", "has no 'Agend'"),
        ("tests.unit.nowhere.Agent", "there is no module"),
        (Agent, "proxy_addr is required"),
        (None, "proxy_addr is required"),
    ],
)
def test_what_is_no_workflow_is_refused(workflow: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resolve_workflow(workflow)


def test_something_without_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="callable 'run'"):
        resolve_workflow(tmp_path, proxy_addr="http://h")


class Leaving:
    """Raises what would end its caller, from inside."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        raise self.error


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
async def test_an_agent_that_cancels_itself_or_exits_is_a_failed_episode(
    url: str, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    workflow = OpenAIProxyWorkflow("inline", Leaving(error), url)
    with pytest.raises(AgentFailed, match=error.__name__):
        await workflow.arun_episode(None, DATA)
    assert workflow.failures.counts == {error.__name__: 1}
    assert f"an episode failed: {error.__name__}" in caplog.text and "task grouped, session grouped-" in caplog.text
