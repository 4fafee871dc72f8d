"""AReaL's own workflow runs its agents against this server, given its address in place of AReaL's proxy.

AReaL's client starts, rewards, ends and exports sessions, and its deserialiser returns the sampled tokens. Our client
of the same name returns the same."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import httpx
import numpy as np
import pytest

import tokengrove.areal
from tests.conformance.packages import package
from tests.e2e.processes import server_process
from tokengrove.areal import OpenAIProxyClient, concat_padded_tensors, to_areal
from tokengrove.client import Client
from tokengrove.client.adapters import areal

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
KEY = "a-key-of-the-administrator"
TURNS = 3


class Agent:
    """An AReaL agent that runs TURNS turns over one API. It rewards the first reply with 2 and the last with 1, or,
    without `by_id`, only the last with 1."""

    def __init__(self, api: str = "chat", *, by_id: bool = True) -> None:
        self._turn = getattr(self, "_" + api)
        self._by_id = by_id
        self.ids: list[str] = []

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> Any:
        async with package("openai").AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
            messages: list[dict[str, Any]] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"{data['question']} {turn}"})
                interaction_id, text = await self._turn(openai, messages)
                messages.append({"role": "assistant", "content": text})
                self.ids.append(interaction_id)
        return {self.ids[0]: 2.0, self.ids[-1]: 1.0} if self._by_id else 1.0

    async def _chat(self, openai: Any, messages: list[dict[str, Any]]) -> tuple[str, str]:
        reply = await openai.chat.completions.create(model="any", messages=messages)
        return reply.id, reply.choices[0].message.content

    async def _responses(self, openai: Any, messages: list[dict[str, Any]]) -> tuple[str, str]:
        reply = await openai.responses.create(model="any", input=messages)
        return reply.id, reply.output_text


class Documented:
    """The agent of AReaL's and of our documentation: its key is an argument (inline) or a variable (subproc)."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        openai = package("openai").AsyncOpenAI(
            base_url=given.get("base_url") or os.getenv("OPENAI_BASE_URL"),
            api_key=given.get("api_key") or os.getenv("OPENAI_API_KEY"),
            http_client=given.get("http_client"),
            max_retries=0,
        )
        await openai.chat.completions.create(model="default", messages=data["messages"])
        return 1.5


class OfTheEnvironment:
    """AReaL's example for mode subproc, which has nothing but the variables."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        with package("openai").OpenAI() as openai:
            openai.chat.completions.create(model="default", messages=data["messages"])
        return 1.5


class Keyless(Documented):
    """An agent that does not use the key that it was given."""

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        return await super().run(data, **{**given, "api_key": "DUMMY"})


@pytest.fixture(scope="module")
def open_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server without keys and flags of its own."""
    with server_process(tmp_path_factory.mktemp("open"), "--engine", "scripted", "--engine-arg", "tokens=8") as process:
        yield process.url.rstrip("/")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with AReaL's rules: starts take granted capacity, and a session's key also rewards and ends it."""
    flags = ["--engine", "scripted", "--engine-arg", "tokens=8", "--admin-key", KEY]
    flags += ["--rewards-by", "session", "--capacity-control"]
    with server_process(tmp_path_factory.mktemp("areal"), *flags) as process:
        yield process.url.rstrip("/")


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_areals_workflow_runs_rewards_and_exports_a_session(url: str, api: str) -> None:
    agent = Agent(api)
    interactions = await _episode(url, agent, discount=0.5)
    assert list(interactions) == agent.ids
    _equal(interactions, _samples(url, "individual"))
    # Each reward, plus half the return of the next turn.
    assert [interaction.reward for interaction in interactions.values()] == [2.25, 0.5, 1.0]


async def test_areals_workflow_exports_a_chain_as_one_interaction(url: str) -> None:
    agent = Agent(by_id=False)
    interactions = await _episode(url, agent, export_style="concat")
    assert list(interactions) == agent.ids[-1:]
    _equal(interactions, _samples(url, "concat"))
    [chain] = interactions.values()
    assert chain.reward == 1.0
    assert int(chain.to_tensor_dict()["loss_mask"].sum()) >= 8 * TURNS


async def test_areals_trainer_pads_the_interactions_into_one_batch(url: str) -> None:
    data: Any = package("areal.utils.data")
    interactions = await _episode(url, Agent())
    batch = data.concat_padded_tensors([interaction.to_tensor_dict() for interaction in interactions.values()])
    samples = [_samples(url, "individual")[interaction_id] for interaction_id in interactions]
    assert batch["input_ids"].shape == (TURNS, max(len(sample.input_ids) for sample in samples))
    for row, sample in enumerate(samples):
        mask = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][mask].tolist() == sample.input_ids.tolist()
        assert batch["logprobs"][row][mask].tolist() == sample.logprobs.tolist()
    assert batch["rewards"].tolist() == [3.0, 1.0, 1.0]


async def test_our_adapter_fills_areals_class_like_areals_client(url: str) -> None:
    types: Any = package("areal.experimental.openai.types")
    interactions = await _episode(url, Agent(), discount=0.5)
    samples = _samples(url, "individual")
    filled = areal.fill([samples[name] for name in interactions], types.InteractionWithTokenLogpReward)
    assert list(filled) == list(interactions)
    for name, interaction in interactions.items():
        assert isinstance(filled[name], types.InteractionWithTokenLogpReward)
        assert (filled[name].interaction_id, filled[name].reward) == (name, interaction.reward)
        tensors = filled[name].to_tensor_dict()
        assert set(tensors) == set(interaction.to_tensor_dict())
        for column, values in interaction.to_tensor_dict().items():
            assert tensors[column].dtype == values.dtype and tensors[column].tolist() == values.tolist(), column


async def test_areals_deserialiser_and_batch_take_parents_messages_and_more_columns(url: str) -> None:
    types: Any = package("areal.experimental.openai.types")
    server: Any = package("areal.experimental.openai.proxy.server")
    data: Any = package("areal.utils.data")
    agent = Agent()
    await _episode(url, agent)
    body = {"filter": {"status": "ended"}, "format": "areal", "layout": "individual", "include": ["messages"]}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
        answer = (await http.post(f"{url}/export_trajectories", json=body)).json()
    found = {name: answer["interactions"][name] for name in agent.ids}
    assert [found[name]["parent"] for name in agent.ids] == [None, *agent.ids[:-1]]
    assert list(server.deserialize_interactions(found)) == agent.ids
    with Client(url, admin_key=KEY) as client:
        export = client.export(filter={"status": "ended"}, layout="individual", include=["messages"])
    samples = [sample for sample in export.samples if sample.interaction_id in found]
    filled = areal.fill(samples, types.InteractionWithTokenLogpReward, columns=("weight", "returns"))
    assert [filled[name].parent for name in agent.ids] == [None, *(filled[name] for name in agent.ids[:-1])]
    assert filled[agent.ids[1]].remaining_messages[-1]["content"] == "question 1"
    batch = data.concat_padded_tensors([interaction.to_tensor_dict() for interaction in filled.values()])
    assert batch["weight"].tolist() == pytest.approx([1 / TURNS] * TURNS)
    for row, sample in enumerate(samples):
        assert int(batch["loss_mask"][row].sum()) == int(sample.loss_mask.sum()) > 0
        assert set(batch["returns"][row][batch["loss_mask"][row] == 1].tolist()) == {sample.reward}


@pytest.mark.parametrize(
    ("mode", "agent"), [("inline", Documented()), ("subproc", Documented()), ("subproc", OfTheEnvironment())]
)
@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
async def test_areals_workflow_returns_its_rewards_in_both_modes(
    url: str, open_url: str, keyed: bool, mode: str, agent: Any
) -> None:
    options = {"admin_api_key": KEY} if keyed else {}
    for _ in range(2):
        interactions = await _run(mode, agent, url if keyed else open_url, **options)
        assert [interaction.reward for interaction in interactions.values()] == [1.5]


async def test_areals_workflow_gets_nothing_of_an_agent_that_does_not_use_its_key(url: str, open_url: str) -> None:
    assert await _run("inline", Keyless(), open_url) == {}
    with pytest.raises(package("openai").AuthenticationError):
        await _run("inline", Keyless(), url, admin_api_key=KEY)


@pytest.mark.parametrize("style", ["individual", "concat"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_our_client_returns_the_tensors_of_areals_workflow(url: str, api: str, style: str) -> None:
    data: Any = package("areal.utils.data")
    theirs = list((await _episode(url, Agent(api), discount=0.5, export_style=style)).values())
    agent = Agent(api)
    async with _client(url) as client:
        given = {"base_url": client.session_url, "api_key": client.session_api_key, "http_client": None}
        for name, reward in (await agent.run({"question": "question"}, **given)).items():
            await client.set_reward(name, reward)
    results = await client.export_interactions(0.5, style)
    assert list(results) == (agent.ids if style == "individual" else agent.ids[-1:])
    ours = list(results.values())
    assert [found.reward for found in ours] == [found.reward for found in theirs]
    tensors = [[found.to_tensor_dict() for found in side] for side in (ours, theirs)]
    _same(*map(data.concat_padded_tensors, tensors))
    for pad_value in (0.0, -1.0):
        _same(concat_padded_tensors(tensors[0], pad_value), data.concat_padded_tensors(tensors[1], pad_value))


async def test_both_clients_export_the_same_of_one_session(url: str) -> None:
    aiohttp, areals = package("aiohttp"), package("areal.experimental.openai.proxy.client_session")
    async with aiohttp.ClientSession() as session:
        arguments = {"session": session, "base_url": url, "task_id": "shared", "admin_api_key": KEY}
        theirs = areals.OpenAIProxyClient(**arguments)
        _grant(url)
        async with theirs:
            await Agent().run({"question": "q"}, base_url=url, api_key=theirs.session_api_key, http_client=None)
            await theirs.set_last_reward(1.0)
        ours = OpenAIProxyClient(**arguments)
        ours.session_id = theirs.session_id
        for style in ("individual", "concat"):
            one, other = await ours.export_interactions(0.9, style), await theirs.export_interactions(0.9, style)
            assert list(one) == list(other)
            for name, found in one.items():
                _same(found.to_tensor_dict(), other[name].to_tensor_dict())


async def test_linear_credit_is_the_discount_of_areals_cache(url: str) -> None:
    """Two conversations in one session: AReaL's rule passes a reward through both."""
    cache, types = package("areal.experimental.openai.cache"), package("areal.experimental.openai.types")
    async with _client(url) as client:
        given = {"base_url": client.session_url, "api_key": client.session_api_key, "http_client": None}
        agents = [Agent(), Agent()]
        for number, agent in enumerate(agents):
            for name, reward in (await agent.run({"question": number}, **given)).items():
                await client.set_reward(name, reward)
    theirs = cache.InteractionCache()
    for name, found in to_areal(await client.export_interactions()).items():
        assert isinstance(found, types.InteractionWithTokenLogpReward)
        theirs[name] = types.InteractionWithTokenLogpReward(
            messages=found.messages, output_message_list=found.output_message_list, completion=found.completion
        )
    for agent in agents:
        theirs.set_reward(agent.ids[0], 2.0)
        theirs.set_reward(agent.ids[-1], 1.0)
    expected = {name: found.reward for name, found in theirs.apply_reward_discount(0.9).items()}
    linear = await client.export_interactions(0.9, credit="linear")
    assert {name: found.reward for name, found in linear.items()} == pytest.approx(expected)
    assert {name: found.parent and found.parent.interaction_id for name, found in linear.items()} == {
        name: found.parent and found.parent.interaction_id for name, found in theirs.items()
    }


async def test_areals_executor_and_groups_take_our_results(url: str) -> None:
    executor, engine = package("areal.infra.workflow_executor"), package("areal.infra.remote_inf_engine")
    data: Any = package("areal.utils.data")
    ours: list[Any] = []

    class Workflow(package("areal.api.workflow_api").RolloutWorkflow):  # type: ignore[misc]
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            async with _client(url) as client:
                given = {"base_url": client.session_url, "api_key": client.session_api_key, "http_client": None}
                await Agent().run(data, **given)
                await client.set_last_reward(1.0)
            ours.append(await client.export_interactions(0.9))
            return to_areal(ours[-1])

    grouped = engine.GroupedRolloutWorkflow(Workflow(), 2, logging.getLogger("areal"))
    trajectory = await grouped.arun_episode(None, {"question": "q"})
    assert executor.check_trajectory_format(trajectory)
    every = {**ours[0], **ours[1]}
    assert (set(trajectory), len(trajectory)) == (set(every), 2 * TURNS)
    _same(
        data.concat_padded_tensors([found.to_tensor_dict() for found in trajectory.values()]),
        data.concat_padded_tensors([every[name].to_tensor_dict() for name in trajectory]),
    )


@pytest.mark.parametrize("name", ["InteractionWithTokenLogpReward", "ModelResponse"])
def test_our_results_have_every_attribute_of_areals_classes(name: str) -> None:
    theirs, ours = getattr(package("areal.experimental.openai.types"), name), getattr(tokengrove.areal, name)
    assert {field.name for field in fields(theirs)} <= {field.name for field in fields(ours)}
    logging_only = {"input_name_for_logging"}
    assert set(vars(theirs)) - set(dir(ours)) - {field.name for field in fields(ours)} <= logging_only


def test_interactions_that_users_make_have_the_tensors_of_areals_class() -> None:
    types, tensors = package("areal.experimental.openai.types"), []
    for kinds in (types, tokengrove.areal):
        above = None
        for start, output, reward in (([1, 2, 3], [4, 5], None), ([1, 2, 3, 4, 5, 6, 7], [8, 9], 1.0)):
            response = kinds.ModelResponse(start, output, [-0.5, -0.25], [len(start)] * 2)
            above = kinds.InteractionWithTokenLogpReward(response, reward, above, "concat")
        assert above is not None
        tensors.append(above.to_tensor_dict())
    _same(*tensors)


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[OpenAIProxyClient]:
    """A session by our client, with the capacity that it takes."""
    _grant(url)
    async with OpenAIProxyClient(base_url=url, task_id="ours", admin_api_key=KEY) as client:
        yield client


def _grant(url: str) -> None:
    with Client(url, admin_key=KEY) as client:
        client.grant_capacity()


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that two sets of tensors are equal, dtypes and shapes included."""
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert ours[name].tolist() == tensor.tolist(), name


async def _run(mode: str, agent: Any, url: str, **options: Any) -> dict[str, Any]:
    """Run an episode as AReaL's trainer does; return what the trainer receives."""
    workflow: Any = package("areal.experimental.openai.proxy.workflow")
    data = {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    runner = workflow.OpenAIProxyWorkflow(mode, agent, proxy_addr=url, **options)
    interactions: dict[str, Any] = await runner.arun_episode(None, data)
    return interactions


async def _episode(url: str, agent: Agent, **options: Any) -> dict[str, Any]:
    """Run an episode of `agent`; return what AReaL's trainer receives."""
    workflow: Any = package("areal.experimental.openai.proxy.workflow")
    runner = workflow.OpenAIProxyWorkflow("inline", agent, proxy_addr=url, admin_api_key=KEY, **options)
    interactions: dict[str, Any] = await runner.arun_episode(None, {"question": "question"})
    return interactions


def _samples(url: str, layout: str) -> dict[str, Any]:
    """Return all samples by interaction id, read with the project's own client in another format."""
    with Client(url, admin_key=KEY) as client:
        export = client.export(filter={"status": "ended"}, layout=layout, discount=0.5)
    return {sample.interaction_id: sample for sample in export.samples}


def _equal(interactions: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    torch: Any = package("torch")
    kinds = dict.fromkeys(("input_ids", "loss_mask", "versions"), torch.int64)
    kinds |= {"logprobs": torch.float32, "attention_mask": torch.bool}
    for interaction_id, interaction in interactions.items():
        tensors, sample = interaction.to_tensor_dict(), samples[interaction_id]
        assert interaction.interaction_id == interaction_id
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {**kinds, "rewards": torch.float32}
        assert tensors["rewards"].tolist() == [interaction.reward]
        for name in kinds:
            assert tensors[name].shape == (1, len(sample.input_ids)), name
            assert np.array_equal(tensors[name][0].numpy(), getattr(sample, name)), name
        assert 0 < int(tensors["loss_mask"].sum()) < len(sample.input_ids)
