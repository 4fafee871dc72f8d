"""From an engine's columns to the fields of trainers, through the server and its exports, over turns and forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recording_engine import RecordingEngine, experts_of, kept_of
from tests.support import assistant, call_text, says, serving, user
from tokengrove.areal import OpenAIProxyClient
from tokengrove.client import AsyncClient, Export, Sample
from tokengrove.client.adapters import miles, nemo_rl, prime_rl, skyrl, slime, verl
from tokengrove.client.adapters.replay import kept_sets, sampled_logprobs
from tokengrove.verl import AgentLoopManager, ToolResponse, function_tool
from tokengrove.verl.tools import get_function_tool

HELLO: list[Any] = [user("hello")]
RECORDED: dict[str, Any] = {"replay": ["experts", "kept"]}


def rows(sample: Sample) -> Any:
    """The experts of a sample's tokens but the last, by the rule of the engine."""
    return experts_of(sample.input_ids[:-1], 0)


async def forked(folder: Path, **how: Any) -> Export:
    """Export a session of two turns, with a fork after the first."""
    async with (
        serving(folder, says("one", "two", "three"), engine_type=RecordingEngine) as server,
        AsyncClient(app=server.app) as client,
    ):
        await server.ok("/rl/start_session", {"session_id": "s", **RECORDED})
        await server.chat(HELLO)
        for text in ("go on", "or so"):
            await server.chat([*HELLO, assistant("one"), user(text)])
        return await client.export(session_id="s", **how)


@pytest.mark.parametrize("format", ["npz", "safetensors", "arrow"])
async def test_the_columns_of_every_branch_reach_the_fields_of_trainers(tmp_path: Path, format: str) -> None:
    if format == "arrow":
        pytest.importorskip("pyarrow")
    export = await forked(tmp_path, layout="concat", format=format)
    first, second = export.samples
    assert first.input_ids.tolist() != second.input_ids.tolist()
    samples = [first, second]
    vocabulary = 1 + max(int(sample.input_ids.max()) for sample in samples)
    batch = verl.padded(samples).batch
    for row, sample in enumerate(samples):
        found = batch["routed_experts"][row][batch["attention_mask"][row] == 1]
        assert found[:-1].tolist() == rows(sample).tolist()
        sets = kept_sets(sample)
        assert sets is not None
        for token in np.flatnonzero(~sets.missing):
            assert sets.of(int(token), vocabulary).tolist() == kept_of(int(sample.input_ids[token]))
        assert not (sets.missing & (sample.loss_mask > 0)).any()
        assert sampled_logprobs(sample).tolist() == np.where(sample.loss_mask, -0.25, 0).tolist()
    for sample, of_slime, of_miles in zip(samples, slime.fields(samples), miles.fields(samples), strict=True):
        assert of_slime["rollout_routed_experts"].tolist() == rows(sample).tolist()
        assert of_miles["rollout_routed_experts"].tolist() == rows(sample).tolist()
    output = skyrl.generator_output(samples)
    for sample, routes, support in zip(
        samples, output["rollout_expert_indices"], output["rollout_sample_support"], strict=True
    ):
        assert routes.tolist() == rows(sample).tolist()
        trained = sample.loss_mask[-len(support) :] > 0
        assert (support[trained, 0] == sample.input_ids[-len(support) :][trained]).all()
    assert [each["routed_experts"]["shape"][0] for each in prime_rl.training_samples(samples)] == [
        len(sample.input_ids) for sample in samples
    ]
    assert [len(nemo_rl.output_items(sample)) for sample in samples] == [2, 1]


@function_tool
def weather() -> ToolResponse:
    """Tell the weather."""
    return ToolResponse(text="sunny")


async def test_verls_switch_puts_the_recorded_experts_into_the_batch(tmp_path: Path) -> None:
    rollout = {"enable_rollout_routing_replay": True, "multi_turn": {"format": "hermes"}}
    config = {"actor_rollout_ref": {"rollout": {**rollout, "prompt_length": 96, "response_length": 160}}}
    script = says(*[call_text("weather", "{}"), "It is sunny."] * 2)
    async with (
        serving(tmp_path, script, engine_type=RecordingEngine) as server,
        AsyncClient(app=server.app) as client,
    ):
        manager = AgentLoopManager(config, client, max_concurrency=1, tools=[get_function_tool("weather")])
        made = await manager.generate_sequences([{"raw_prompt": HELLO, "agent_name": "tool_agent"}] * 2)
    experts, attention = made.batch["routed_experts"], made.batch["attention_mask"]
    assert experts.shape[:2] == attention.shape
    for row, real in enumerate(attention == 1):
        tokens = made.batch["input_ids"][row][real]
        assert made.batch["response_mask"][row].min() == 0
        assert experts[row][real][:-1].tolist() == experts_of(tokens[:-1], 0).tolist()


async def test_areals_responses_have_the_experts_of_their_turns(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, says("one", "two"), engine_type=RecordingEngine, replay=("experts",)) as server,
        AsyncClient(app=server.app) as client,
    ):
        async with OpenAIProxyClient(client=client, task_id="t") as proxy:
            for messages in (HELLO, [*HELLO, assistant("one"), user("go on")]):
                await server.chat(messages, session=str(proxy.session_id))
            await proxy.set_last_reward(1.0)
        found = await proxy.export_interactions()
    assert len(found) == 2
    for interaction in found.values():
        response = interaction.model_response
        assert response is not None
        tokens = [*response.input_tokens, *response.output_tokens]
        assert response.routed_experts.tolist() == experts_of(tokens[:-1], 0).reshape(len(tokens) - 1, -1).tolist()
