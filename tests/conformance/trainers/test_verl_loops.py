"""verl's own agent loops and worker run on our server manager; ours return the same tokens, and so does the export.

Nothing of verl is replaced: the loops, the worker without Ray, its padded batch, and tools made with its classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.conformance.packages import package
from tests.e2e.processes import server_process
from tokengrove.client import AsyncClient, Client, Sample
from tokengrove.verl import AgentLoopManager, AgentLoopMetrics, AgentLoopWorker, AsyncLLMServerManager

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
KEY = "a-key-of-the-administrator"
FLAGS = ["--engine", "scripted", "--engine-arg", "play=agent", "--engine-arg", "chunk=64", "--admin-key", KEY]
PROMPT, RESPONSE = 1024, 512
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
QUESTION = [{"role": "user", "content": "What is the weather in Paris and in Rome? Ask for each."}]
SIMPLE = [{"role": "user", "content": "Say exactly: Größe 日本"}]
TOOL_FILE = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
async def get_weather(city: str):
    """Tell the weather of a city.

    Args:
        city: Name of the city.
    """
    return ToolResponse(text=f"In {city} it is 21 °C and sunny. " * 3), 0.5, {"asked": city}
'''
TOOL_YAML = """
tools:
  - class_name: tests.conformance.trainers.verl_tools.Clock
    config: {type: native, zone: CET}
    tool_schema:
      type: function
      function:
        name: get_time
        description: Tell the time of a city.
        parameters:
          type: object
          properties: {city: {type: string, description: Name of the city.}}
          required: [city]
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_process(tmp_path_factory.mktemp("loops"), *FLAGS) as process:
        yield process.url.rstrip("/")


@pytest.fixture(scope="module")
def thinking_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model reasons before it answers."""
    with server_process(tmp_path_factory.mktemp("thinking"), *FLAGS, "--engine-arg", "think=1") as process:
        yield process.url.rstrip("/")


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """verl's own configuration of its PPO trainer, with tools of both kinds."""
    hydra, omegaconf = package("hydra"), package("omegaconf")
    for name in ("cachetools", "fastapi", "uvicorn", "verl.experimental.agent_loop"):
        package(name)  # verl's loops import these
    from proxy.engine.tiny.model import builtin_model_folder

    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(TOOL_FILE, encoding="utf-8")
    (folder / "tools.yaml").write_text(TOOL_YAML, encoding="utf-8")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={builtin_model_folder()}",
                "actor_rollout_ref.rollout.name=sglang",
                f"data.max_prompt_length={PROMPT}",
                f"data.max_response_length={RESPONSE}",
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={folder / 'tools.yaml'}",
                f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder / 'tools.py'}",
            ],
        )
    omegaconf.OmegaConf.set_struct(config, False)
    return config


def changed(config: Any, **values: Any) -> Any:
    """A copy of `config` with other settings of `actor_rollout_ref.rollout.multi_turn`, or of the rollout itself."""
    copy = package("omegaconf").OmegaConf.create(config)
    rollout = copy.actor_rollout_ref.rollout
    for name, value in values.items():
        (rollout.multi_turn if name in rollout.multi_turn else rollout)[name] = value
    return copy


def row_of(messages: list[dict[str, Any]], agent: str = "") -> dict[str, Any]:
    """The columns of one sample, with `agent_name` if it is given."""
    named = {"agent_name": agent} if agent else {}
    return {"raw_prompt": messages, "index": 0, "extra_info": {}, "tools_kwargs": {}, **named}


def batch_of(*rows: dict[str, Any], **meta: Any) -> Any:
    """A DataProto with the columns of `rows`."""
    columns = {}
    for name in rows[0]:
        columns[name] = np.empty(len(rows), dtype=object)
        columns[name][:] = [row[name] for row in rows]
    return package("verl.protocol").DataProto(batch=None, non_tensor_batch=columns, meta_info=meta)


@asynccontextmanager
async def session_of(url: str) -> Any:
    async with AsyncClient(url, KEY) as client, client.session("verl") as session:
        yield session


def exported(url: str, session_id: str) -> Sample:
    """The one chain of a session."""
    with Client(url, KEY) as client:
        [sample] = client.export(session_id=session_id, layout="concat").samples
    return sample


def recorded(url: str) -> int:
    """How many chains the server has."""
    with Client(url, KEY) as client:
        return len(client.export(filter={}, layout="concat").samples)


async def run_verls(config: Any, manager: Any, agent: str, row: dict[str, Any]) -> Any:
    """What verl's own loop of this name returns."""
    loops: Any = package("verl.experimental.agent_loop.agent_loop")
    module, name = loops._agent_loop_registry[agent]["_target_"].rsplit(".", 1)
    worker = loops.AgentLoopWorker(config, manager)
    loop = getattr(package(module), name)(
        trainer_config=loops.DictConfigWrap(config),
        server_manager=manager,
        tokenizer=worker.tokenizer,
        processor=None,
        hf_model_type=worker.hf_model_type,
        dataset_cls=worker.dataset_cls,
        data_config=loops.DictConfigWrap(config.data),
        **({"tools": loops.ToolListWrap(worker.tools)} if agent == "tool_agent" else {}),
    )
    return await loop.run(dict(SAMPLING), **row)


# Settings, and what comes of them: the length of the response, how much of it is tool results, and the turns.
CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "all": ({"max_parallel_calls": 4}, (360, 152, 4)),
    "one call at a time": ({"max_parallel_calls": 1}, (222, 81, 4)),
    "cut results": ({"max_parallel_calls": 4, "max_tool_response_length": 21}, (208, 76, 4)),
    "one answer": ({"max_assistant_turns": 1}, (65, 0, 2)),
    "one result": ({"max_user_turns": 1}, (222, 81, 4)),
    "an end within the first answer": ({"response_length": 20}, (20, 0, 2)),
    "an end with the first answer": ({"response_length": 65}, (65, 0, 2)),
    "no room for results": ({"max_parallel_calls": 4, "response_length": 150}, (65, 0, 2)),
    "room for all but one id of the results": ({"max_parallel_calls": 4, "response_length": 217}, (65, 0, 2)),
    "room for one id after the results": ({"max_parallel_calls": 4, "response_length": 218}, (218, 152, 4)),
    "an end within the second answer": ({"max_parallel_calls": 4, "response_length": 330}, (330, 152, 4)),
}


@pytest.mark.parametrize("case", CASES)
async def test_verls_tool_loop_runs_in_a_session_and_its_tokens_are_exported(
    url: str, configured: Any, case: str
) -> None:
    settings, expected = CASES[case]
    output = await _check_exported(url, changed(configured, **settings), "tool_agent")
    assert (len(output.response_ids), output.response_mask.count(0), output.num_turns) == expected
    assert not package("tests.conformance.trainers.verl_tools").alive


async def test_verls_single_turn_loop_runs_in_a_session_and_its_tokens_are_exported(url: str, configured: Any) -> None:
    output = await _check_exported(url, configured, "single_turn_agent")
    assert output.num_turns == 2 and set(output.response_mask) == {1}


async def test_verls_worker_runs_on_our_manager_and_makes_its_batch(url: str, configured: Any) -> None:
    loops: Any = package("verl.experimental.agent_loop.agent_loop")
    rows = [row_of(QUESTION, "tool_agent"), row_of(SIMPLE, "single_turn_agent")] * 3
    config, before = changed(configured, max_parallel_calls=4), recorded(url)
    async with AsyncLLMServerManager(config, url, admin_key=KEY) as manager:
        worker = loops.AgentLoopWorker(config, manager)
        output = await worker.generate_sequences(batch_of(*rows, global_steps=7))
    assert output.batch["responses"].shape == (len(rows), RESPONSE)
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4, 2] * 3
    assert output.non_tensor_batch["tool_rewards"].tolist() == [[0.5, 0.5], []] * 3
    assert output.batch["response_mask"].sum(1).tolist()[:2] == [360 - 152, int(output.batch["response_mask"][1].sum())]
    assert recorded(url) == before  # a manager of a server records nothing


async def _check_exported(url: str, config: Any, agent: str) -> Any:
    """Run one of verl's loops in a session; its output begins the session's one chain, token by token."""
    async with session_of(url) as session:
        output = await run_verls(config, AsyncLLMServerManager(config, session), agent, row_of(QUESTION))
    sample, start = exported(url, session.session_id), len(output.prompt_ids)
    length = start + len(output.response_ids)
    assert sample.input_ids[:length].tolist() == output.prompt_ids + output.response_ids
    assert sample.loss_mask[start:length].tolist() == output.response_mask
    assert np.allclose(sample.logprobs[start:length], output.response_logprobs)
    return output


# Fields that our batches have beside verl's.
OF_OURS = {"session_id", "stop_reason", "num_cached_tokens"}


@pytest.mark.parametrize("case", CASES)
async def test_our_batch_is_verls_in_every_column(url: str, configured: Any, case: str) -> None:
    await _check_same_batch(url, changed(configured, **CASES[case][0]))


async def test_our_batch_is_verls_with_a_model_that_reasons(thinking_url: str, configured: Any) -> None:
    await _check_same_batch(thinking_url, changed(configured, max_parallel_calls=4))


async def _check_same_batch(url: str, config: Any) -> None:
    loops: Any = package("verl.experimental.agent_loop.agent_loop")
    rows = [row_of(QUESTION, "tool_agent"), row_of(SIMPLE, "single_turn_agent"), row_of(SIMPLE, "tool_agent")]
    async with AsyncLLMServerManager(config, url, admin_key=KEY) as manager:
        worker = loops.AgentLoopWorker(config, manager)
        theirs = await worker.generate_sequences(batch_of(*rows, global_steps=7))
    options = {"admin_key": KEY, "tools": worker.tools, "pad_token_id": worker.tokenizer.pad_token_id}
    ours = await AgentLoopWorker(config, url, **options).generate_sequences(batch_of(*rows, global_steps=7))
    assert type(ours) is type(theirs)
    assert set(ours.batch.keys()) == set(theirs.batch.keys())
    for name, values in theirs.batch.items():
        assert ours.batch[name].dtype == values.dtype and ours.batch[name].shape == values.shape, name
        assert ours.batch[name].tolist() == values.tolist(), name
    assert not any(theirs.non_tensor_batch.pop("multi_modal_inputs"))  # there are no images
    for name in theirs.non_tensor_batch.keys() | ours.non_tensor_batch.keys() - OF_OURS:
        values = theirs.non_tensor_batch[name]
        assert ours.non_tensor_batch[name].dtype == values.dtype, name
        assert ours.non_tensor_batch[name].tolist() == values.tolist(), name
    for row, session_id in enumerate(ours.non_tensor_batch["session_id"]):
        sample, tokens = exported(url, session_id), ours.batch["attention_mask"][row].bool()
        length = int(tokens.sum())
        assert sample.input_ids[:length].tolist() == ours.batch["input_ids"][row][tokens].tolist()


async def test_our_manager_times_a_batch_under_verls_names_and_the_engine_sleeps_again(
    url: str, configured: Any
) -> None:
    loops: Any = package("verl.experimental.agent_loop.agent_loop")
    config = changed(configured, tool_config_path=None, function_tool_path=None)
    assert config.actor_rollout_ref.rollout.free_cache_engine
    manager = AgentLoopManager(config, url, admin_key=KEY)
    output = await manager.generate_sequences(batch_of(row_of(SIMPLE), row_of(QUESTION), validate=True))
    with Client(url, KEY) as client:
        assert client.engine().released
    await manager.wake_up()
    metrics = [[AgentLoopMetrics().model_dump()] * len(output)]
    assert set(output.meta_info["timing"]) == set(loops.AgentLoopManager._performance_metrics(None, metrics, output))
    assert set(output.non_tensor_batch["agent_name"]) == {"single_turn_agent"}


async def test_a_loop_on_verls_own_base_class_runs_in_our_worker(url: str, configured: Any) -> None:
    loops: Any = package("verl.experimental.agent_loop.agent_loop")
    config = changed(configured, tool_config_path=None, function_tool_path=None)
    agent = "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"
    tokenizer = loops.AgentLoopWorker(config, None).tokenizer
    worker = AgentLoopWorker(config, url, admin_key=KEY, tokenizer=tokenizer)
    theirs, ours = await worker.generate_sequences(batch_of(row_of(SIMPLE, agent), row_of(SIMPLE, "single_turn_agent")))
    assert theirs.batch["responses"].tolist() == ours.batch["responses"].tolist()
    sample = exported(url, theirs.non_tensor_batch["session_id"])
    assert sample.input_ids.tolist() == theirs.batch["input_ids"][theirs.batch["attention_mask"].bool()].tolist()
