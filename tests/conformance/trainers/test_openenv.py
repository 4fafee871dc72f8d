"""Environments of openenv 0.10, behind its own server and by its own clients, are played through this server.

The scripted engine stands for a model: it calls tools with the numbers of its prompt.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ROOT, server_process

pytest.importorskip("openenv", reason="openenv is not installed")

from openenv.core import GenericEnvClient, MCPToolClient, OpenAIClient, Tool
from openenv.core.harness import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ResourceSessionFactory,
    StepEnvSessionAdapter,
    build_harness_rollout_func,
)
from openenv.core.harness.capture import require_llm

from tokengrove.client import Client
from tokengrove.openenv import (
    EnvironmentSessionFactory,
    HarnessRolloutWorker,
    InterceptionServer,
    ServerGenerate,
    SessionModelStep,
    ToolEnvironment,
    is_resource_factory,
)
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task, play, resolve_agent

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
GUESS = Tool(
    name="guess",
    description="Guess the number.",
    input_schema={"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
)
SAMPLING = {"temperature": 1.0, "max_tokens": 256}


@contextlib.contextmanager
def environment_server(name: str) -> Iterator[str]:
    """An environment behind openenv's server, in a process of its own."""
    words = [sys.executable, "-m", "tests.conformance.trainers.openenv_games", name, "0"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise AssertionError("the environment's server has not started")
        yield found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    with environment_server("guess") as url:
        yield url


@pytest.fixture(scope="module")
def sums() -> Iterator[str]:
    with environment_server("sums") as url:
        yield url


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    flags = ["--engine", "scripted", "--engine-arg", "play=agent"]
    with server_process(tmp_path_factory.mktemp("sampling"), *flags) as process, Client(process.url) as client:
        yield client


@pytest.fixture(scope="module")
def interception(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InterceptionServer]:
    folder = tmp_path_factory.mktemp("mail")
    with server_process(folder, "--engine", "mailbox") as process, InterceptionServer(process.url) as server:
        yield server


class Guessing(ResourceSessionFactory[StepEnvSessionAdapter]):
    """openenv's own adapter over its own client."""

    def __init__(self, url: str) -> None:
        self._url = url

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> StepEnvSessionAdapter:
        return StepEnvSessionAdapter(
            GenericEnvClient(base_url=self._url),
            task=task,
            seed=seed,
            episode_id=episode_id,
            tool_specs=[GUESS],
            action_builder=lambda name, arguments: arguments,
            initial_messages_builder=lambda result, task: [{"role": "user", "content": task["prompt"]}],
        )


def task(said: int, number: int) -> dict[str, Any]:
    return {"prompt": f"Guess the number {said}", "seed": number}


def test_a_stepwise_environment_is_played_scored_and_exported(
    guessing: str, sampling: Client, interception: InterceptionServer
) -> None:
    assert is_resource_factory(Guessing)
    generate = ServerGenerate(sampling)
    worker = HarnessRolloutWorker(
        EnvironmentSessionFactory(interception, Guessing(guessing)), generate, sampling=SAMPLING, group_size=2
    )
    groups = worker.run([task(4, 4), task(5, 9), task(6, 6)])
    assert [[rollout.reward for rollout in group] for group in groups] == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert worker.failures == []
    name = groups[1][0].rollout_id
    trace, told = worker.fetch_training_trace(name), [generate.tokens(name, turn) for turn in generate.turns(name)]
    assert [(turn.prompt_token_ids, turn.completion_token_ids) for turn in trace.turns] == [
        (turn.prompt_ids, turn.token_ids) for turn in told
    ]
    assert all(sum(turn.loss_mask) == len(turn.completion_token_ids) for turn in trace.turns)
    for group in groups:
        ids = [generate.session_id(rollout.rollout_id) for rollout in group]
        samples = sampling.export(session_ids=ids).samples
        assert [sample.reward for sample in samples] == [rollout.reward for rollout in group]
        assert all(int(sample.loss_mask.sum()) > 0 for sample in samples)


def test_an_environment_that_fails_fails_its_rollout_only(
    guessing: str, sampling: Client, interception: InterceptionServer
) -> None:
    worker = HarnessRolloutWorker(
        EnvironmentSessionFactory(interception, Guessing(guessing)), ServerGenerate(sampling), sampling=SAMPLING
    )
    groups = worker.run([task(-3, 3), task(8, 8)])
    assert [len(group) for group in groups] == [0, 1]
    assert "negative" in str(worker.failures[0].error)


def test_an_environment_of_mcp_tools_is_played_by_its_steps(
    sums: str, sampling: Client, interception: InterceptionServer
) -> None:
    def environment(task: Any) -> ToolEnvironment:
        return ToolEnvironment(MCPToolClient(base_url=sums), task)

    worker = HarnessRolloutWorker(
        EnvironmentSessionFactory(interception, environment), ServerGenerate(sampling), sampling=SAMPLING
    )
    prompts = ["Add 3 and 4", "Add 3 and 5", "Add -3 and 5"]
    groups = worker.run([{"prompt": prompt} for prompt in prompts])
    assert worker.failures == []
    assert [group[0].reward for group in groups] == [1.0, 0.0, None]
    told = [[m["content"] for m in group[0].messages if m["role"] == "tool"] for group in groups]
    assert told[:2] == [["7"], ["8"]] and "no negative numbers" in told[2][0]


async def test_a_client_of_openenv_is_an_agent_of_episodes(sums: str, sampling: Client) -> None:
    spec = AgentSpec("path", "openenv.core:MCPToolClient", arguments={"base_url": sums, "max_turns": 3})
    agent = resolve_agent(spec)
    plan = EpisodePlan(Task("sum", {"prompt": "Add 3 and 4"}), 0, 0, Server(sampling.url), spec, "a-sum")
    result = await play(plan, agent)
    await agent.close()
    assert (result.failure, result.message, result.reward) == (None, None, 1.0)


def test_openenvs_own_harness_and_rollout_function_sample_here(guessing: str, sampling: Client) -> None:
    """Its `MCPHarnessAdapter` with a model step of ours gives ids that continue each other."""
    generate, names = ServerGenerate(sampling), iter(("white-0", "white-1"))
    rollout = build_harness_rollout_func(
        session_factory=Seeded(guessing),
        harness_adapter=MCPHarnessAdapter(),
        model_step_builder=lambda trainer, session: SessionModelStep(generate, next(names)),
        limits=HarnessRunLimits(max_turns=4, sampling=SAMPLING),
    )
    found = rollout([task(4, 4), task(5, 9)], None)
    assert found["env_reward"] == [1.0, 0.0]
    for number, name in enumerate(("white-0", "white-1")):
        told = [generate.tokens(name, turn) for turn in generate.turns(name)]
        assert found["completion_ids"][number] == [token for turn in told for token in turn.token_ids]
        assert found["logprobs"][number] == [value for turn in told for value in turn.logprobs or ()]
    assert [turn.reason for turn in sampling.session_tree("white-1").interactions] == ["first", "continued"]


class Seeded(Guessing):
    """`build_harness_rollout_func` gives only the task."""

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> StepEnvSessionAdapter:
        return super().create(task, task["seed"], episode_id)


async def test_openenvs_llm_client_reaches_a_session(sampling: Client) -> None:
    with sampling.session("llm-client") as session:
        client = OpenAIClient(session.base_url, None, model="policy", api_key=session.api_key)
        answer = await client.complete_with_tools(
            [{"role": "user", "content": "Guess the number 3"}],
            [{"name": "guess", "description": GUESS.description, "inputSchema": GUESS.input_schema}],
        )
        assert (answer.tool_calls[0].name, answer.tool_calls[0].args) == ("guess", {"number": 3})
        assert len(sampling.session_tree(session.session_id).interactions) == 1


def test_openenvs_check_of_an_engine_finds_trainable_tokens_here(tmp_path: Path) -> None:
    """Its capture proxy trains only on an engine that this check grades `tokens`, so that one may stand before this
    server. It takes logprobs for raw ones that do not change with the temperature, so
    the model is a real one.
    """
    with server_process(tmp_path, "--engine", "transformers") as process:
        report = require_llm(process.url, "tokengrove-tiny", require_tokens=True)
    assert report.capture_level == "tokens" and report.logprobs_mode != "raw"
    assert report.param_fixes == [], "no field of its requests is refused"
