"""Workflows of AReaL itself and loops of verl itself are agents of episodes, named by their paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.conformance.packages import package
from tests.e2e.processes import server_process
from tokengrove.client import Client
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task, play, resolve_agent

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
KEY = "a-key-of-the-administrator"
FLAGS = ["--engine", "scripted", "--engine-arg", "play=agent", "--engine-arg", "chunk=64", "--admin-key", KEY]
TASK = Task("hello", {"messages": [{"role": "user", "content": "Say exactly: hello"}], "answer": "hello"})
THERE = "kinds_there"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_process(tmp_path_factory.mktemp("kinds"), *FLAGS) as process:
        yield process.url.rstrip("/")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose attributes paths name."""
    module = ModuleType(THERE)
    monkeypatch.setitem(sys.modules, THERE, module)
    return module


async def played(url: str, target: str, name: str, arguments: dict[str, Any] | None = None) -> EpisodeResult:
    spec = AgentSpec("path", target, arguments=arguments or {})
    agent = resolve_agent(spec)
    try:
        return await play(EpisodePlan(TASK, 0, 0, Server(url, KEY), spec, name), agent)
    finally:
        await agent.close()


class Tokens:
    """What AReaL's workflow asks of a tokenizer, by the server's endpoints."""

    eos_token_id = pad_token_id = 633

    def __init__(self, client: Client) -> None:
        self._client = client

    def decode(self, ids: list[int]) -> str:
        return self._client.detokenize(ids, skip_special_tokens=True)


def exact(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **_: Any) -> float:
    """A reward function of AReaL's, which calls it in another process."""
    return float(completions == answer)


async def test_areals_own_workflow_plays(url: str, there: Any) -> None:
    rlvr, api = package("areal.workflow.rlvr"), package("areal.api.cli_args")

    with Client(url, KEY) as client:
        there.workflow = rlvr.RLVRWorkflow(
            exact,
            api.GenerationHyperparameters(max_new_tokens=64),
            Tokens(client),
            get_input_ids_fn=lambda messages, tokenizer, thinking: client.tokenize(messages),
        )
        result = await played(url, f"{THERE}:workflow", "areal")
        assert (result.failure, result.message, result.reward, result.turns) == (None, None, 1.0, 1)


@pytest.mark.parametrize("path", ["single_turn_agent_loop:SingleTurnAgentLoop", "tool_agent_loop:ToolAgentLoop"])
async def test_verls_own_loop_plays(url: str, path: str) -> None:
    package("verl.experimental.agent_loop")
    result = await played(url, f"verl.experimental.agent_loop.{path}", path.partition(":")[0])
    assert (result.failure, result.message, result.turns) == (None, None, 1)
