"""What samples carry beside tokens: advantages, weights, returns, metrics and metadata reach every trainer's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from tests.samples import chain, sample
from tokengrove.client import Sample
from tokengrove.client.adapters import areal, huggingface, roll, trl, trl_rollout, verl

SESSIONS: dict[str, dict[str, Any]] = {
    "s": {
        "metadata": {"env_id": 7, "group_id": 2, "tag": "maze", "exp_name": "first", "data_source": "gsm8k"},
        "metrics": {"pass_rate": 0.25, "note": "text", "solved": True},
    },
    "t": {"metadata": {"data_source": "math"}, "metrics": {"pass_rate": 0.75}},
}
TOOL = {"type": "function", "function": {"name": "add"}}


def told() -> Sample:
    """Two turns of two tokens, with every column that an export may have, and messages; L is 7."""
    told = chain(
        [([1, 2], [3, 4]), ([8], [5, 6])],
        rewards=[0.5, 1.0],
        group="g",
        first_version=3,
        weight=[0.5],
        advantages=[-2.0],
        step_advantages=[0.25, 0.75],
        token_rewards=[0, 0, 0.125, 0, 0, 0, 0.5],
        finish_reason="stop",
    )
    told.turns[0]["messages"] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    told.turns[0]["tools"] = [TOOL]
    told.turns[1]["messages"] = [{"role": "tool", "content": "c"}, {"role": "assistant", "content": "d"}]
    return told


def other() -> Sample:
    """A sample of another session, without the columns that an export may have."""
    return sample([1], [2], reward=3.0, session="t", group="g")


TOLD = {
    "returns": [0, 0, 1.5, 1.5, 0, 1.0, 1.0],
    "token_rewards": [0, 0, 0.125, 0, 0, 0, 0.5],
    "advantages": [0, 0, -2, -2, 0, -2, -2],
    "step_advantages": [0, 0, 0.25, 0.25, 0, 0.75, 0.75],
}


def test_weight_advantage_and_reward_are_attributes_of_a_sample() -> None:
    full = told()
    assert (full.reward, full.weight, full.advantage) == (1.5, 0.5, -2.0)
    assert full.step_advantages is not None and full.step_advantages.tolist() == [0.25, 0.75]
    assert full.token_rewards is not None and full.token_rewards.tolist() == TOLD["token_rewards"]
    assert full.returns.tolist() == TOLD["returns"]
    plain = other()
    assert (plain.weight, plain.advantage, plain.step_advantages, plain.token_rewards) == (1.0, None, None, None)


def test_values_of_turns_are_spread_over_trained_tokens_only() -> None:
    full = told()
    full.loss_mask[3] = 0
    assert full.per_token([1, 2]).tolist() == [0, 0, 1, 0, 0, 2, 2]
    assert chain([([1], [2])], rewards=[1.0], trained=False).returns.tolist() == [0, 0]


def test_verls_response_has_every_value_per_token_and_the_weight_per_row() -> None:
    batch = verl.padded([told(), other()]).batch
    for name, values in TOLD.items():
        assert batch[name].dtype == np.float32
        assert batch[name].tolist()[0] == values[2:], name
    assert batch["returns"].tolist()[1] == [3, 0, 0, 0, 0]
    assert not batch["advantages"][1].any() and not batch["token_rewards"][1].any()
    assert batch["weight"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [("sample", [0, 0, 0, 0, 1.5]), ("turns", [0, 0.5, 0, 0, 1.0]), ("tokens", [0.125, 0, 0, 0, 0.5])],
)
def test_verls_scores_are_by_sample_by_turn_or_by_token(scores: verl.Scores, expected: list[float]) -> None:
    assert verl.padded([told()], scores=scores).batch["rm_scores"].tolist() == [expected]


def test_verls_scores_of_turns_keep_their_sum_where_a_turn_is_cut_or_not_in_the_sample() -> None:
    cut = verl.padded([told()], scores="turns", response_length=3, on_too_long="truncate").batch
    assert cut["rm_scores"].tolist() == [[0, 0.5, 1.0]]
    masked = told()
    masked.turns[0]["span"] = None
    assert verl.padded([masked], scores="turns").batch["rm_scores"][0].sum() == 1.5


def test_verl_gets_versions_turn_scores_prompts_metadata_and_metrics() -> None:
    result = verl.padded([told(), other()], sessions=SESSIONS)
    found = result.non_tensor_batch
    assert (found["min_global_steps"].tolist(), found["max_global_steps"].tolist()) == ([3, 0], [4, 0])
    assert (found["turn_scores"].tolist(), found["tool_rewards"].tolist()) == ([[0.5, 1.0], [3.0]], [[], []])
    assert found["raw_prompt"].tolist() == [[{"role": "user", "content": "a"}], []]
    assert found["extra_info"].tolist() == [SESSIONS["s"]["metadata"], SESSIONS["t"]["metadata"]]
    assert found["data_source"].tolist() == ["gsm8k", "math"]
    assert found["session_score"].tolist() == [1.5, 3.0]
    assert result.meta_info["reward_extra_keys"] == ["pass_rate"]
    assert found["pass_rate"].tolist() == [0.25, 0.75]


def test_verls_timings_are_the_seconds_of_answers_and_between_them() -> None:
    about = verl.padded([told(), other()]).meta_info
    assert about["metrics"][0] == {
        "generate_sequences": 8.0,
        "tool_calls": 6.0,
        "compute_score": 0.0,
        "num_preempted": -1,
    }
    timing = about["timing"]
    assert [timing[f"agent_loop/generate_sequences/{how}"] for how in ("min", "max", "mean")] == [4.0, 8.0, 6.0]
    assert timing["agent_loop/slowest/tool_calls"] == 6.0
    assert (timing["agent_loop/slowest/prompt_length"], timing["agent_loop/slowest/response_length"]) == (2, 5)
    assert verl.padded([]).meta_info["timing"] == {}


def test_a_session_counts_once_in_its_score_however_many_samples_have_its_turns() -> None:
    full, shared = told(), told()
    assert verl.padded([full, shared]).non_tensor_batch["session_score"].tolist() == [1.5, 1.5]
    assert roll.trajectories([full, shared]).non_tensor_batch["episode_scores"].tolist() == [1.5, 1.5]


def test_the_score_of_a_session_is_not_the_return_of_its_turn() -> None:
    turn = sample([1], [2], reward=0.5, score=2.0)
    assert verl.padded([turn]).non_tensor_batch["session_score"].tolist() == [2.0]
    assert roll.steps([turn]).non_tensor_batch["episode_scores"].tolist() == [2.0]
    assert [entry["session_score"] for entry in areal.interactions([turn]).values()] == [2.0]
    assert trl_rollout.completions([turn])["session_reward"] == [2.0]


def test_rolls_columns_are_of_the_next_token_like_its_logprobs() -> None:
    batch = roll.trajectories([told(), other()]).batch
    for name, values in TOLD.items():
        assert batch[name].tolist()[0] == values[1:], name
    assert (batch["weight"].tolist(), batch["step_rewards"].tolist()) == ([0.5, 1.0], [1.0, 3.0])


def test_rolls_step_rewards_are_returns_where_its_scores_are_rewards() -> None:
    first = sample([1], [2], reward=0.5)
    first.turns[0]["reward"], first.turns[0]["return"] = None, 0.5
    first.raw_rewards[0] = 0.0
    batch = roll.steps([first]).batch
    assert (batch["step_rewards"].tolist(), batch["scores"].sum()) == ([0.5], 0.0)


def test_roll_gets_its_names_from_metadata_and_the_conversation_as_json() -> None:
    fields = roll.trajectories([told(), other()], sessions=SESSIONS, exp_name="second")
    found = fields.non_tensor_batch
    assert found["env_ids"].tolist() == [7, "t"]
    assert found["group_ids"].tolist() == [2, "g"] and found["traj_group_id"].tolist() == ["g", "g"]
    assert found["tags"].tolist() == ["maze", ""] and found["exp_name"].tolist() == ["first", "second"]
    assert [each["content"] for each in orjson.loads(found["messages"][0])] == ["a", "b", "c", "d"]
    assert [orjson.loads(text) for text in found["tools"]] == [[TOOL], []]
    data = orjson.loads(found["trajectory_data"][0])
    assert data["reward_info"] == {"episode_reward": 1.5, "step_reward": 1.5}
    assert (data["trajectory_id"], data["num_actions"], data["finish_reason"]) == ("s", 2, "stop")
    assert data["messages"][-1] == {"role": "assistant", "content": "d"}
    metrics = fields.meta_info["metrics"]
    assert (metrics["env/maze/pass_rate"], metrics["env/maze/solved"], metrics["env//pass_rate"]) == (0.25, 1.0, 0.75)
    assert (metrics["env/maze/response_length"], metrics["env/response_length"]) == (4.0, 2.5)
    assert (metrics["env/maze/latency/step_rt_avg"], metrics["env/maze/traj_time_total"]) == (4.0, 14.0)
    assert [name for name, _ in fields.meta_info["COLUMMNS_CONFIG"]] == [
        *("trajectory_data", "messages", "tools", "exp_name")
    ]


def test_a_step_without_a_state_has_its_index_as_rolls_proxy_names_it() -> None:
    named, nameless = sample([1], [2]), sample([1, 2, 3], [4])
    nameless.turns[0]["state_hash"] = None
    assert roll.steps([named, nameless]).non_tensor_batch["state_hash"].tolist() == ["h0", "step_1"]


def test_areals_entries_have_their_parent_conversation_weight_and_columns_on_request() -> None:
    full = told()
    full.turns[-1]["parent_id"] = "s-0"
    entry = areal.interactions([full], columns=("weight", *TOLD))["s-1"]
    assert (entry["parent"], entry["weight"], entry["advantage"]) == ("s-0", 0.5, -2.0)
    assert [message["content"] for message in entry["messages"]] == ["a", "b", "c"]
    assert entry["output_message_list"] == [{"role": "assistant", "content": "d"}]
    assert entry["tensor_dict"]["weight"].tolist() == [0.5]
    for name, values in TOLD.items():
        assert entry["tensor_dict"][name].tolist() == [values], name


def half_masked(whole: Sample) -> Sample:
    """The same sample after half of its mask was lost."""
    kept = np.flatnonzero(whole.loss_mask)[::2]
    whole.loss_mask[:] = 0
    whole.loss_mask[kept] = 1
    return whole


class Installed:
    """In place of trl and datasets, which are not installed here: keeps what an adapter gives them."""

    RolloutSample = SimpleNamespace
    Value = Sequence = Features = staticmethod(lambda kind: kind)
    Dataset = SimpleNamespace(from_dict=lambda columns, features: columns)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for adapter in (trl, huggingface):
        monkeypatch.setattr(adapter, "library", lambda name: Installed)


def trained_by(samples: Sequence[Sample]) -> dict[str, int]:
    """The number of tokens that each trainer would train."""
    return {
        "trl's asynchronous trainer": sum(int(row.completion_mask.sum()) for row in trl.rollout_samples(samples)),
        "datasets": sum(int(mask.sum()) for mask in huggingface.to_dataset(samples)["loss_mask"]),
        "verl": int(verl.padded(samples).batch["response_mask"].sum()),
        "roll": int(roll.trajectories(samples).batch["response_mask"].sum()),
        "areal": sum(int(e["tensor_dict"]["loss_mask"].sum()) for e in areal.interactions(samples).values()),
        "trl": sum(map(sum, trl_rollout.completions(samples)["env_mask"])),
    }


@pytest.mark.usefixtures("installed")
def test_every_adapter_trains_exactly_the_mask_so_a_lost_half_of_it_is_seen() -> None:
    assert set(trained_by([told(), other()]).values()) == {5}
    assert set(trained_by([half_masked(told()), other()]).values()) == {3}


@pytest.mark.usefixtures("installed")
def test_a_dataset_has_a_column_for_every_field_and_null_where_a_sample_lacks_it() -> None:
    named: dict[str, Any] = huggingface.to_dataset([told(), other()], sessions=SESSIONS)
    own = {each.name for each in fields(Sample)} - {"rewards", "raw_rewards", "extra", "images", "image_table"}
    assert own | {"reward", "raw_reward", "weight", "advantage", "step_advantages", "token_rewards"} <= set(named)
    assert (named["weight"], named["advantage"], named["reward"]) == ([0.5, 1.0], [-2.0, None], [1.5, 3.0])
    assert named["token_rewards"][0].tolist() == TOLD["token_rewards"] and named["token_rewards"][1] is None
    assert [orjson.loads(text)["metadata"] for text in named["session"]] == [
        SESSIONS[name]["metadata"] for name in ("s", "t")
    ]
    assert orjson.loads(named["turns"][0])[1]["reward"] == 1.0
