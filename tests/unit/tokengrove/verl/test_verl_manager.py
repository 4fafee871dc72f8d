"""Batches of samples run in agent loops against a server: every row is what the sample's session exports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest

from tests.support import real_server, user
from tokengrove.client import AsyncClient, AsyncSession, Client, Sample
from tokengrove.client.adapters.verl import VerlBatch
from tokengrove.client.options import MemoryTag
from tokengrove.errors import EngineFailed, EngineIncapable, InvalidRequest, ProxyError, UnsupportedParameter
from tokengrove.rollout.failure_log import TooManyFailedEpisodes
from tokengrove.verl import (
    AgentLoopBase,
    AgentLoopFailed,
    AgentLoopManager,
    AgentLoopOutput,
    AgentLoopWorker,
    AsyncLLMServerManager,
    get_trajectory_info,
    register,
)
from tokengrove.verl.batches import Prompts, padded_outputs
from tokengrove.verl.registry import _agent_loop_registry

KEY = "the-admin-key"
PROMPT, RESPONSE = 48, 24
CONFIG: dict[str, Any] = {
    "actor_rollout_ref": {
        "rollout": {
            "prompt_length": PROMPT,
            "response_length": RESPONSE,
            "temperature": 0.9,
            "top_p": 0.95,
            "val_kwargs": {"temperature": 0.1, "top_k": 5},
        }
    },
    "trainer": {"project_name": "sums", "experiment_name": "first"},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("loops"), admin_key=KEY) as address:
        yield address


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in list(_agent_loop_registry.items()):
        monkeypatch.setitem(_agent_loop_registry, name, entry)
    register("two_turns")(TwoTurns)
    register("printed")(Printed)


def changed(**rollout: Any) -> dict[str, Any]:
    return {**CONFIG, "actor_rollout_ref": {"rollout": {**CONFIG["actor_rollout_ref"]["rollout"], **rollout}}}


class TwoTurns(AgentLoopBase):
    """Two answers with ids between them that no model sampled; a reward, and one by name for the first turn."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.build_prompt(kwargs["raw_prompt"])
        limited = {**sampling_params, "max_tokens": 5}
        first = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=limited)
        second = await self.server_manager.generate("r", prompt_ids=prompt + first + [7, 8], sampling_params=limited)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first, 7, 8, *second],
            response_mask=[1] * 5 + [0] * 2 + [1] * 5,
            response_logprobs=[*first.log_probs, 0.0, 0.0, *second.log_probs],
            num_turns=4,
            metrics={"tool_calls": 0.25},
            reward_score=kwargs.get("extra_info", {}).get("reward", 0.5),
            extra_fields={"tool_rewards": [0.125], "reward_extra_info": {"acc": 1.0}, "sampling": sampling_params},
            named_rewards={"tool": {first.interaction_id: 0.125}},
            stop_reason="done",
        )


class Printed(AgentLoopBase):
    """As the documentation prints a loop, with the tokenizer in a thread."""

    def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
        super().__init__(config, server_manager, tokenizer)
        self.response_length = config.actor_rollout_ref.rollout.response_length

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        if not cls._class_initialized:
            cls._class_initialized = True
            cls.system_prompt = tokenizer.apply_chat_template([{}], add_generation_prompt=False, tokenize=True)  # type: ignore[attr-defined]

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        prompt_ids = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        )
        response_ids = await self.server_manager.generate(
            request_id="r", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=[1] * len(response_ids),
            num_turns=2,
            metrics={},
        )


def batch(*agents: str, **meta: Any) -> dict[str, Any]:
    return {
        "raw_prompt": [[user(f"hi {place}")] for place in range(len(agents))],
        "agent_name": list(agents),
        "uid": [f"{meta.get('name', 'group')}-{place // 2}" for place in range(len(agents))],
        "index": [place // 2 for place in range(len(agents))],
        "meta_info": {name: value for name, value in meta.items() if name != "name"},
    }


def exported(url: str, session_id: str) -> Sample:
    with Client(url, KEY) as client:
        [sample] = client.export(session_id=session_id, layout="concat").samples
    return sample


def listed(url: str, **metadata: Any) -> list[dict[str, Any]]:
    with Client(url, KEY) as client:
        return [each for each in client.sessions() if metadata.items() <= each["metadata"].items()]


def assert_exported(url: str, made: VerlBatch, row: int) -> Sample:
    """The row holds exactly the tokens, masks and logprobs that the session has."""
    sample = exported(url, made.non_tensor_batch["session_id"][row])
    length = len(sample.input_ids)
    tokens = made.batch["attention_mask"][row].astype(bool)
    assert made.batch["input_ids"][row][tokens].tolist() == sample.input_ids.tolist()
    assert made.batch["position_ids"][row][tokens].tolist() == list(range(length))
    of_response = tokens[PROMPT:]
    prompt = length - of_response.sum()
    assert made.batch["response_mask"][row][of_response].tolist() == sample.loss_mask[prompt:].tolist()
    assert not made.batch["response_mask"][row][~of_response].any()
    if "rollout_log_probs" in made.batch:
        assert made.batch["rollout_log_probs"][row][of_response].tolist() == sample.logprobs[prompt:].tolist()
    return sample


def test_every_row_is_what_its_session_exports(url: str) -> None:
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    made = manager.generate_sequences(batch("two_turns", "single_turn_agent", "two_turns", "single_turn_agent"))
    for row in range(4):
        assert_exported(url, made, row)
    assert {name: array.shape for name, array in made.batch.items()} == {
        "prompts": (4, PROMPT),
        "responses": (4, RESPONSE),
        "input_ids": (4, PROMPT + RESPONSE),
        "attention_mask": (4, PROMPT + RESPONSE),
        "position_ids": (4, PROMPT + RESPONSE),
        "response_mask": (4, RESPONSE),
        "rollout_log_probs": (4, RESPONSE),
    }
    others = made.non_tensor_batch
    assert others["__num_turns__"].tolist() == [4, 2, 4, 2]
    assert others["uid"].tolist() == ["group-0", "group-0", "group-1", "group-1"]
    assert others["raw_prompt"][2] == [user("hi 2")]
    assert others["stop_reason"].tolist() == ["done", "length", "done", "length"]
    assert others["min_global_steps"].tolist() == others["max_global_steps"].tolist() == [0, 0, 0, 0]
    assert made.meta_info["timing"]["agent_loop/tool_calls/max"] == 0.25
    lengths = made.batch["attention_mask"][:, PROMPT:].sum(axis=1).tolist()
    assert 12 in lengths and made.meta_info["timing"]["agent_loop/slowest/response_length"] in lengths
    assert "agent_loop/generate_sequences/mean" in made.meta_info["timing"]


def test_the_session_of_a_sample_says_which_it_is(url: str) -> None:
    AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(
        {**batch(*["two_turns"] * 3, global_steps=11, name="m"), "data_source": ["lessons"] * 3}
    )
    told = sorted(listed(url, step=11), key=lambda each: (each["group_id"], each["metadata"]["rollout_n"]))
    assert [each["metadata"] for each in told] == [
        {
            "step": 11,
            "sample_index": index,
            "rollout_n": rollout,
            "validate": False,
            "project": "sums",
            "experiment": "first",
            "agent_name": "two_turns",
            "uid": f"m-{index}",
            "data_source": "lessons",
        }
        for index, rollout in ((0, 0), (0, 1), (1, 0))
    ]
    assert [(each["group_id"], each["group_size"]) for each in told] == [("m-0", 2), ("m-0", 2), ("m-1", 1)]
    assert {(each["status"], each["outcome"], each["exit_reason"]) for each in told} == {("ended", "Finished", "done")}
    assert told[0]["metrics"]["tool_rewards"] == [0.125]
    assert told[0]["metrics"]["tool_calls"] == 0.25


def test_samples_without_a_uid_or_an_index_are_no_group(url: str) -> None:
    sample = {"raw_prompt": [user("hi")], "agent_name": "two_turns"}
    given = {"meta_info": {"global_steps": 17}, "raw_prompt": [[user("hi")]] * 3, "agent_name": ["two_turns"] * 3}
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    manager.generate_sequences(given)
    manager.generate_sequences({**given, "meta_info": {"global_steps": 18}, "index": [4, 4, None]})
    made = manager.generate_sequences([{**sample, "uid": "shared"}, sample])
    assert made.non_tensor_batch["uid"].tolist() == ["shared", None]
    assert [each["group_id"] for each in listed(url, step=17)] == [None] * 3
    groups = {each["metadata"].get("sample_index"): each["group_id"] for each in listed(url, step=18)}
    assert groups[None] is None
    assert groups[4].startswith("4-step-18-")
    told = {each["group_id"]: each["group_size"] for each in listed(url, agent_name="two_turns", step=-1)}
    assert (told["shared"], told[None]) == (1, None)


def test_rewards_are_at_the_last_token_and_in_the_session(url: str) -> None:
    given = [{"raw_prompt": [user("hi")], "agent_name": "two_turns", "extra_info": {"reward": 2.5}}]
    made = AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(given)
    assert made.batch["rm_scores"][0].tolist() == [0.0] * 11 + [2.5] + [0.0] * (RESPONSE - 12)
    assert assert_exported(url, made, 0).reward == 2.5
    assert made.non_tensor_batch["acc"].tolist() == [1.0]
    assert made.meta_info["reward_extra_keys"] == ["acc"]
    with Client(url, KEY) as client:
        session = client.export(session_id=made.non_tensor_batch["session_id"][0], reward_name="tool")
    assert [turn["reward"] for turn in session.samples[0].turns] == [0.125, 2.5]


@pytest.mark.parametrize(
    ("meta", "row", "expected"),
    [
        ({}, {}, {"temperature": 0.9, "top_p": 0.95, "top_k": -1}),
        ({"validate": True}, {}, {"temperature": 0.1, "top_p": 1.0, "top_k": 5}),
        ({}, {"__do_sample__": [False]}, {"temperature": 0, "top_p": 1.0, "top_k": -1}),
        ({}, {"__do_sample__": [True]}, {"temperature": 0.9, "top_p": 0.95, "top_k": -1}),
        ({"validate": True}, {"__do_sample__": [False]}, {"temperature": 0.1, "top_p": 1.0, "top_k": 5}),
    ],
)
def test_sampling_follows_the_configuration(
    url: str, meta: dict[str, Any], row: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences({**batch("two_turns", **meta), **row})
    assert made.non_tensor_batch["sampling"][0] == {**expected, "repetition_penalty": 1.0, "logprobs": True}


@pytest.mark.parametrize(
    ("rollout", "meta", "temperature"),
    [
        ({"do_sample": False}, {}, 0),
        ({"do_sample": True}, {}, 0.9),
        ({}, {"do_sample": False}, 0),
        ({"do_sample": False}, {"validate": True}, 0.1),
        ({"val_kwargs": {"do_sample": False, "top_k": 5}}, {"validate": True}, 0),
        ({"val_kwargs": {"temperature": 0.6}}, {"validate": True}, 0.6),
    ],
)
@pytest.mark.filterwarnings("ignore:.*do_sample is false")
def test_without_do_sample_a_batch_is_greedy(
    url: str, rollout: dict[str, Any], meta: dict[str, Any], temperature: float
) -> None:
    manager = AgentLoopManager(changed(**rollout), url, admin_key=KEY)
    found = manager.generate_sequences(batch("two_turns", **meta)).non_tensor_batch["sampling"][0]
    assert found["temperature"] == temperature
    if not temperature:
        assert (found["top_p"], found["top_k"]) == (1.0, -1)


def test_samples_are_repeated_n_times_as_groups(url: str) -> None:
    manager = AgentLoopManager(changed(n=3, val_kwargs={"n": 2}), url, admin_key=KEY)
    given = {**batch("two_turns", "two_turns", global_steps=131), "uid": ["a", "b"], "index": [4, 9]}
    given["kept"] = np.array([1.5, 2.5])
    made = manager.generate_sequences(given)
    assert made.non_tensor_batch["uid"].tolist() == ["a"] * 3 + ["b"] * 3
    assert made.non_tensor_batch["kept"].tolist() == [1.5] * 3 + [2.5] * 3
    assert made.batch["responses"].shape[0] == 6
    told = listed(url, step=131)
    assert sorted((each["group_id"], each["metadata"]["rollout_n"]) for each in told) == [
        (uid, rollout) for uid in "ab" for rollout in range(3)
    ]
    assert {each["group_size"] for each in told} == {3}
    validated = manager.generate_sequences({**given, "meta_info": {"global_steps": 132, "validate": True}})
    assert validated.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]


def test_samples_without_uid_and_index_become_groups_when_they_are_repeated(url: str) -> None:
    made = AgentLoopManager(changed(n=2), url, admin_key=KEY).generate_sequences(
        {
            "raw_prompt": [[user("hi")], [user("ho")]],
            "agent_name": ["two_turns"] * 2,
            "meta_info": {"global_steps": 133},
        }
    )
    assert [messages[0]["content"] for messages in made.non_tensor_batch["raw_prompt"]] == ["hi", "hi", "ho", "ho"]
    groups = [(each["metadata"]["sample_index"], each["group_id"]) for each in listed(url, step=133)]
    assert len(set(groups)) == 2 and all(group is not None for _, group in groups)


@pytest.mark.parametrize(
    "columns",
    [{"uid": ["a", "a", "b", "b"]}, {"index": [0, 0, 1, 1]}, {"raw_prompt": [[user(text)] for text in "ccdd"]}],
)
def test_a_batch_that_is_repeated_already_runs_as_it_is(url: str, columns: dict[str, Any]) -> None:
    given = {"raw_prompt": [[user("hi")]] * 4, "agent_name": ["two_turns"] * 4, **columns}
    manager = AgentLoopManager(changed(n=2), url, admin_key=KEY)
    assert len(manager.generate_sequences(given).batch["responses"]) == 4
    baseline = {**batch("two_turns"), "meta_info": {"do_sample": False}}
    assert len(manager.generate_sequences(baseline).batch["responses"]) == 1


async def test_a_worker_that_repeats_nothing_says_so(url: str) -> None:
    with pytest.warns(UserWarning, match=r"rollout.n is 2, but each sample .* AgentLoopManager repeats"):
        await AgentLoopWorker(changed(n=2), url, admin_key=KEY).generate_sequences(batch("two_turns"))


def test_a_group_of_another_size_than_n_is_told(url: str) -> None:
    with pytest.warns(UserWarning, match="rollout.n is 3, but the batch has a group of 2 samples"):
        made = AgentLoopManager(changed(n=3), url, admin_key=KEY).generate_sequences(batch("two_turns", "two_turns"))
    assert len(made.batch["responses"]) == 2


def test_full_determinism_seeds_each_turn_by_the_seed_and_its_place_in_the_step(url: str) -> None:
    def played(seed: int) -> list[int]:
        manager = AgentLoopManager(changed(full_determinism=True, seed=seed), url, admin_key=KEY)
        made = manager.generate_sequences(batch("two_turns", "two_turns", global_steps=135))
        ids = made.non_tensor_batch["session_id"]
        turns = [turn for name in ids for turn in exported(url, name).turns]
        return [turn["sampling"]["seed"] for turn in turns]

    seeds = played(1)
    assert seeds == played(1)
    assert len(set(seeds)) == 4 and set(seeds).isdisjoint(played(2))


class Chooses(AsyncLLMServerManager):
    """Sends everything to the server that it was given last."""

    asked: ClassVar[list[str]] = []

    def _choose_server(self, request_id: str) -> AsyncClient | AsyncSession:
        self.asked.append(request_id)
        return self.server_handles[-1]


def test_the_servers_of_sessions_are_those_that_a_manager_of_ones_own_chooses(url: str) -> None:
    nobody = "http://127.0.0.1:1"
    AgentLoopManager(CONFIG, Chooses(CONFIG, [nobody, url], admin_key=KEY), admin_key=KEY).generate_sequences(
        batch("two_turns", "two_turns", global_steps=136)
    )
    assert len(listed(url, step=136)) == 2 and len(set(Chooses.asked)) == 2


def test_sessions_of_a_validation_are_exported_on_request_only(url: str) -> None:
    AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(batch("two_turns", validate=True, global_steps=12))
    with Client(url, KEY) as client:
        assert not client.export(filter={"metadata": {"step": 12}}).samples
        assert len(client.export(filter={"metadata": {"step": 12}, "validation": "only"}).samples) == 1


def test_a_loop_as_the_documentation_prints_it_runs_more_than_once(url: str) -> None:
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    for _ in range(2):
        made = manager.generate_sequences(batch("printed", "printed"))
        for row in range(2):
            sample = assert_exported(url, made, row)
            assert sample.logprobs[-1] == made.batch["rollout_log_probs"][row][-1]


async def test_a_manager_is_awaited_on_an_event_loop(url: str) -> None:
    manager = await AgentLoopManager.create(config=CONFIG, llm_client=AsyncClient(url, KEY))
    made = await manager.generate_sequences(batch("two_turns"))
    assert made.batch["responses"].shape == (1, RESPONSE)
    made = await AgentLoopWorker(CONFIG, [url], admin_key=KEY).generate_sequences(batch("two_turns"))
    assert made.meta_info["metrics"][0]["tool_calls"] == 0.25


def test_samples_without_an_agent_name_run_in_the_default_loop(url: str) -> None:
    config = changed(agent={"default_agent_loop": f"{__name__}:TwoTurns"})
    made = AgentLoopManager(config, url, admin_key=KEY).generate_sequences([{"raw_prompt": [user("hi")]}])
    assert made.non_tensor_batch["stop_reason"].tolist() == ["done"]
    made = AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences({"raw_prompt": [[user("hi")]]})
    assert made.non_tensor_batch["stop_reason"].tolist() == ["length"]


def test_a_loop_has_neither_the_admin_key_nor_the_control_key(url: str) -> None:
    found = {}

    class Curious(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            session = self.server_manager.server_handles[0]
            found.update(vars(session), admin_key=session._client.admin_key)
            with pytest.raises(ProxyError):
                await session.set_reward(1.0)
            with pytest.raises(ProxyError):
                await session.end()
            return await super().run(sampling_params, **kwargs)

    register("curious")(Curious)
    AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(batch("curious"))
    assert found["control_key"] == found["api_key"]
    assert found["admin_key"] is None


class Fails(AgentLoopBase):
    """Fails on the sample that says so; the others wait for ever."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await self.server_manager.generate("r", prompt_ids=[1, 2], sampling_params={"max_tokens": 2})
        if kwargs["fails"]:
            raise ValueError("no such city")
        await asyncio.Event().wait()
        raise AssertionError


def test_a_sample_that_fails_is_named_and_the_others_end(url: str) -> None:
    register("fails")(Fails)
    given = {**batch("fails", "fails", "fails", global_steps=13), "fails": [False, False, True]}
    with pytest.raises(
        AgentLoopFailed, match=r"sample 2 .*'fails', uid 'group-1', session 'verl-1-.*no such city"
    ) as raised:
        AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(given)
    assert raised.value.row == 2
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.__cause__.__context__ is None  # nothing else is told to have failed
    told = {each["exit_reason"] for each in listed(url, step=13)}
    assert told == {"cancelled", "ValueError: no such city"}
    assert {(each["status"], each["outcome"]) for each in listed(url, step=13)} == {("ended", "Failed")}


async def test_a_session_that_ends_well_while_the_batch_is_cancelled_stays_so(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = AsyncSession.end

    async def cancelled_meanwhile(self: AsyncSession, **options: Any) -> Any:
        task.cancel()
        return await end(self, **options)

    monkeypatch.setattr(AsyncSession, "end", cancelled_meanwhile)
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    task = asyncio.ensure_future(manager.generate_sequences(batch("two_turns", global_steps=77)))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [each["outcome"] for each in listed(url, step=77)] == ["Finished"]
    assert "could not be ended" not in caplog.text


def test_failed_samples_are_left_out_on_request(url: str) -> None:
    class Half(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            if kwargs["fails"]:
                raise ValueError("no such city")
            return await super().run(sampling_params, **kwargs)

    register("half")(Half)
    given = {**batch("half", "half", "half"), "fails": np.array([False, True, False])}
    made = AgentLoopManager(CONFIG, url, admin_key=KEY, on_failure="drop").generate_sequences(given)
    assert made.non_tensor_batch["index"].tolist() == [0, 1]
    assert made.non_tensor_batch["fails"].tolist() == [False, False]
    [failed] = made.meta_info["failed"]
    assert failed["row"] == 1
    assert "no such city" in failed["error"]
    with pytest.raises(AgentLoopFailed, match="no such city"):
        AgentLoopManager(CONFIG, url, admin_key=KEY, on_failure="drop").generate_sequences(
            {**given, "fails": [True] * 3}
        )


def failing(**more: Any) -> dict[str, Any]:
    """Six samples, each a group of its own, that fail."""
    register("fails")(Fails)
    return {**batch(*["fails"] * 6, **more), "uid": [f"u{number}" for number in range(6)], "fails": [True] * 6}


@pytest.mark.parametrize(("agent", "options", "most"), [({}, {}, 3), ({"max_failed_episodes": 5}, {}, 5)])
def test_so_many_failed_samples_in_a_row_end_the_batch_with_the_reasons(
    url: str, caplog: pytest.LogCaptureFixture, agent: dict[str, Any], options: dict[str, Any], most: int
) -> None:
    manager = AgentLoopManager(
        changed(agent=agent), url, admin_key=KEY, on_failure="drop", max_concurrency=1, **options
    )
    with pytest.raises(
        TooManyFailedEpisodes, match=rf"{most} x ValueError, such as task verl-.*no such city"
    ) as raised:
        manager.generate_sequences(failing())
    assert raised.value.counts == {"ValueError": most}
    told = caplog.records[0].getMessage()
    assert told.startswith("a sample failed: ValueError: no such city (task verl-") and "Traceback" in told
    assert "session verl-" in told and "2 times by now" in caplog.records[1].getMessage()


def test_failed_samples_are_counted_over_batches_and_a_keyword_wins(url: str) -> None:
    config = changed(agent={"max_failed_episodes": 7})
    manager = AgentLoopManager(config, url, admin_key=KEY, on_failure="drop", max_failed_episodes=8)
    with pytest.raises(AgentLoopFailed):
        manager.generate_sequences(failing())
    with pytest.raises(TooManyFailedEpisodes, match="max_failed_episodes is 8"):
        manager.generate_sequences(failing())
    with pytest.raises(InvalidRequest, match="max_failed_episodes is 0"):
        AgentLoopManager(config, url, admin_key=KEY, max_failed_episodes=0)


def test_a_batch_says_how_many_of_its_samples_have_failed(url: str) -> None:
    class Silent(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            if kwargs["fails"] == "raises":
                raise ValueError("no such city")
            mask = [int(kwargs["fails"] == "not")]
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=mask, num_turns=2, metrics={})

    register("silent")(Silent)
    given = {**batch("silent", "silent", "silent"), "fails": ["raises", "asks nothing", "not"]}
    made = AgentLoopManager(CONFIG, url, admin_key=KEY, on_failure="drop").generate_sequences(given)
    assert (made.meta_info["failed_episodes"], len(made.meta_info["failed"]), len(made.batch["prompts"])) == (2, 1, 2)


def test_a_sample_that_takes_too_long_ends_as_timeout(url: str) -> None:
    register("fails")(Fails)
    given = {**batch("fails", global_steps=14), "fails": [False]}
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY, sample_timeout_s=0.2)
    with pytest.raises(AgentLoopFailed, match=r"TimeoutError: it took longer than 0.2 s \(sample_timeout_s\)"):
        manager.generate_sequences(given)
    [ended] = listed(url, step=14)
    assert ended["outcome"] == "Timeout" and "sample_timeout_s" in ended["exit_reason"]
    assert ended["delivery"] == "runner"


async def test_a_cancelled_batch_ends_its_sessions(url: str) -> None:
    waiting = asyncio.Event()

    class Waits(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

    register("waits")(Waits)
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    running = asyncio.create_task(manager.generate_sequences(batch("waits", global_steps=15)))
    await waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(each["outcome"], each["exit_reason"]) for each in listed(url, step=15)] == [("Failed", "cancelled")]


async def test_a_cancellation_in_the_end_of_a_failed_sample_waits_for_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            raise ValueError("no such city")

    ending, go_on, end = asyncio.Event(), asyncio.Event(), AsyncSession.end

    async def held(session: AsyncSession, *args: Any, **options: Any) -> Any:
        ending.set()
        await go_on.wait()
        return await end(session, *args, **options)

    monkeypatch.setattr(AsyncSession, "end", held)
    register("raises")(Raises)
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    running = asyncio.create_task(manager.generate_sequences(batch("raises", global_steps=31)))
    await ending.wait()
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(each["status"], each["outcome"]) for each in listed(url, step=31)] == [("ended", "Failed")]


def test_no_session_is_kept_for_tokenizers_after_the_batch(url: str) -> None:
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)
    manager.generate_sequences(batch("printed", "two_turns"))
    [address] = manager.worker.addresses
    assert address.live == {}


def test_versions_and_logprobs_that_a_loop_leaves_out_are_added_in_order(url: str) -> None:
    class Bare(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            output = await super().run(sampling_params, **kwargs)
            for answer, version in zip(self.server_manager.answers, (3, 5), strict=True):
                answer.versions = [version] * len(answer)
            output.response_logprobs = output.logprobs = None
            return output

    register("bare")(Bare)
    made = AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(batch("bare"))
    assert "rollout_log_probs" in made.batch
    assert_exported(url, made, 0)
    versions = [made.non_tensor_batch[name].tolist() for name in ("min_global_steps", "max_global_steps")]
    assert versions == [[3], [5]]


def test_a_loop_that_never_called_the_model_has_no_data(url: str) -> None:
    class Silent(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return AgentLoopOutput([1, 2], [], [], reward_score=1.0)

    register("silent")(Silent)
    made = AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(batch("silent", global_steps=16))
    assert made.batch["attention_mask"].sum() == 2
    assert [each["outcome"] for each in listed(url, step=16)] == ["NoData"]


@pytest.mark.parametrize(("prompt", "response", "named"), [(PROMPT + 1, 1, "prompt"), (1, RESPONSE + 1, "response")])
def test_an_output_that_does_not_fit_fails_its_sample(url: str, prompt: int, response: int, named: str) -> None:
    class Long(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            return AgentLoopOutput([1] * prompt, [1] * response, [1] * response)

    register("long")(Long)
    with pytest.raises(AgentLoopFailed, match=f"'{named}_ids', and actor_rollout_ref.rollout.{named}_length"):
        AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(batch("long"))


def test_no_more_samples_run_at_once_than_allowed(url: str) -> None:
    running, most = 0, 0

    class Counted(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().run(sampling_params, **kwargs)
            finally:
                running -= 1

    register("counted")(Counted)
    AgentLoopManager(CONFIG, url, admin_key=KEY, max_concurrency=2).generate_sequences(batch(*["counted"] * 5))
    assert most == 2


def test_memory_is_there_for_the_batch_only(url: str) -> None:
    manager = AgentLoopManager(changed(free_cache_engine=True), url, admin_key=KEY)
    with Client(url, KEY) as client:
        manager.sleep()
        assert client.engine().released
        manager.generate_sequences(batch("two_turns"))
        assert client.engine().released
        register("fails")(Fails)
        with pytest.raises(AgentLoopFailed):
            manager.generate_sequences({**batch("fails"), "fails": [True]})
        assert client.engine().released
        manager.wake_up()
        assert not client.engine().released


def test_memory_that_another_released_comes_back_too(url: str) -> None:
    manager = AgentLoopManager(changed(free_cache_engine=True), url, admin_key=KEY)
    with Client(url, KEY) as client:
        client.release_memory(["cuda_graph"])
        manager.generate_sequences(batch("single_turn_agent"))
        assert set(client.engine().released) == set(get_args(MemoryTag))  # all at once, as vLLM must have it
        client.release_memory()
        manager.wake_up()
        assert not client.engine().released


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_meanwhile_does_not_keep_the_memory(
    url: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    releasing, go_on, release = asyncio.Event(), asyncio.Event(), AsyncClient.release_memory

    async def held(client: AsyncClient, *args: Any) -> Any:
        releasing.set()
        await go_on.wait()
        return await release(client, *args)

    monkeypatch.setattr(AsyncClient, "release_memory", held)
    register("fails")(Fails)
    manager = AgentLoopManager(changed(free_cache_engine=True), url, admin_key=KEY)
    given = {**batch("fails" if fails else "two_turns"), "fails": [fails]}
    running = asyncio.create_task(manager.generate_sequences(given))
    await releasing.wait()
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with AsyncClient(url, KEY) as client:
        assert (await client.engine()).released
        await manager.wake_up()


async def test_samples_that_wait_for_an_engine_that_sleeps_are_told_of(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = AgentLoopManager(CONFIG, url, admin_key=KEY)

    async def woken_up(_: Prompts) -> VerlBatch:
        assert "is released (cuda_graph, kv_cache, weights), and the samples wait for it: call wake_up()" in caplog.text
        await manager.wake_up()
        return await run_batch(prompts)

    prompts, run_batch = Prompts.of(batch("single_turn_agent")), manager.worker.run_batch
    monkeypatch.setattr(manager.worker, "run_batch", woken_up)
    await manager.sleep()
    assert len((await manager.generate_sequences(batch("single_turn_agent"))).batch["prompts"]) == 1


def test_an_engine_that_keeps_its_memory_is_told_of(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def incapable(*_: Any, **__: Any) -> Any:
        raise EngineIncapable("this engine has no memory to release")

    monkeypatch.setattr(AsyncClient, "release_memory", incapable)
    monkeypatch.setattr(AsyncClient, "resume_memory", incapable)
    manager = AgentLoopManager(changed(free_cache_engine=True), url, admin_key=KEY)
    with caplog.at_level("WARNING"):
        assert len(manager.generate_sequences(batch("two_turns")).batch["prompts"]) == 1
    assert "free_cache_engine: an engine keeps its memory: this engine has no memory to release" in caplog.text
    for call in (manager.sleep, manager.wake_up):
        with pytest.raises(EngineIncapable):
            call()


def test_the_failure_of_a_batch_matters_more_than_that_of_the_memory(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any, **__: Any) -> Any:
        raise EngineFailed("the engine has crashed")

    monkeypatch.setattr(AsyncClient, "release_memory", failing)
    register("fails")(Fails)
    manager = AgentLoopManager(changed(free_cache_engine=True), url, admin_key=KEY)
    with pytest.raises(AgentLoopFailed, match="no such city"):
        manager.generate_sequences({**batch("fails"), "fails": [True]})
    with pytest.raises(EngineFailed):
        manager.generate_sequences(batch("two_turns"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "no samples"),
        ({"raw_prompt": []}, "no samples"),
        ([{"prompt": "hi"}], "no 'raw_prompt', .* its columns are prompt"),
        ({"raw_prompt": ["hi"]}, "sample 0"),
        ({"raw_prompt": [[user("hi")]], "index": [1, 2]}, "'index' has 2 values"),
        (7, "a batch is"),
    ],
)
def test_a_batch_of_another_form_is_refused(url: str, given: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(given)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"teacher_client": object()}, UnsupportedParameter, "teacher_client"),
        ({"reward_loop_worker_handles": [1]}, UnsupportedParameter, "reward_loop_worker_handles"),
        ({"on_failure": "ignore"}, InvalidRequest, "on_failure"),
        ({"max_concurrency": 0}, InvalidRequest, "max_concurrency"),
        ({"worker_group": "http://other"}, InvalidRequest, "worker_group"),
        ({"server_handles": None}, InvalidRequest, "server"),
        ({"server_handles": 3}, InvalidRequest, "server"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        AgentLoopManager(CONFIG, **{"server_handles": "http://here", **options})


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_a_chat_template_of_the_configuration_is_refused(tokenizer: object) -> None:
    config = {"actor_rollout_ref": {"model": {"custom_chat_template": "{{ messages }}"}}}
    with pytest.raises(UnsupportedParameter, match=r"chat_template\.jinja"):
        AgentLoopManager(config, "http://here", tokenizer=tokenizer)


async def test_rollouts_of_a_sample_are_counted() -> None:
    found = await get_trajectory_info(4, [7, 7, 8, 7], validate=True)
    assert [(each["sample_index"], each["rollout_n"]) for each in found] == [(7, 0), (7, 1), (8, 0), (7, 0)]
    assert all(each["step"] == 4 and each["validate"] for each in found)


def test_padding_is_that_of_verls_documentation() -> None:
    output = AgentLoopOutput([1, 2, 3, 4], [5, 6, 7, 8, 9, 10], [1, 1, 1, 0, 0, 1], reward_score=1.0)
    made = padded_outputs([output], {}, prompt_length=8, response_length=10, pad_token_id=0)
    assert made.batch["prompts"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4]]
    assert made.batch["responses"].tolist() == [[5, 6, 7, 8, 9, 10, 0, 0, 0, 0]]
    assert made.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0, 1, 0, 0, 0, 0]]
    assert made.batch["attention_mask"].tolist() == [[0] * 4 + [1] * 10 + [0] * 4]
    assert made.batch["position_ids"][0, :14].tolist() == [0, 0, 0, 0, *range(10)]
    assert made.batch["rm_scores"].tolist() == [[0.0] * 5 + [1.0] + [0.0] * 4]


def test_a_batch_of_arrays_keeps_their_dtypes() -> None:
    prompts = Prompts.of(VerlBatch({}, {"raw_prompt": np.array([[{"a": 1}], [{"a": 2}]]), "index": np.array([4, 5])}))
    assert prompts.kept([1])["index"].dtype == np.int64
    assert prompts.sample(1)["index"] == 5


def test_a_file_of_the_configuration_names_loops(url: str, tmp_path: Path) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text("- name: of_the_file\n  _target_: tokengrove.verl.SingleTurnAgentLoop\n")
    agent = {"agent_loop_config_path": str(path), "default_agent_loop": "of_the_file"}
    found = AgentLoopManager(changed(agent=agent), url, admin_key=KEY).generate_sequences(
        {"raw_prompt": [[user("hi")]] * 2}
    )
    assert found.non_tensor_batch["agent_name"].tolist() == ["of_the_file"] * 2
    assert found.batch["response_mask"].sum(axis=1).all()


class Leaving(AgentLoopBase):
    """Raises what would end its caller, from inside; samples without `leaves` go well."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if (error := kwargs["leaves"]) is not None:
            raise error
        prompt = await self.build_prompt(kwargs["raw_prompt"])
        sampled = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=sampled[:4],
            response_mask=[1] * 4,
            num_turns=2,
            metrics={},
            reward_score=0.5,
        )


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_a_loop_that_cancels_itself_or_exits_is_a_failed_sample(
    url: str, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    register("leaving")(Leaving)
    given = {**batch("leaving", "leaving"), "leaves": [error, None]}
    dropping = AgentLoopManager(CONFIG, url, admin_key=KEY, on_failure="drop")
    found = dropping.generate_sequences(given)
    assert (len(found.batch["responses"]), found.meta_info["failed_episodes"]) == (1, 1)
    assert f"a sample failed: {error.__name__}" in caplog.text and "sample 0, agent 'leaving', session" in caplog.text
    with pytest.raises(AgentLoopFailed, match=f"sample 0 .*{error.__name__}"):
        AgentLoopManager(CONFIG, url, admin_key=KEY).generate_sequences(given)
