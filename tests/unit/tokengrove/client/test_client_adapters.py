"""Names, dtypes, shapes and values of each adapter, written out by hand. The trainers' libraries are not needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.samples import chain, sample
from tokengrove.client.adapters import areal, art, roll, trl, verl
from tokengrove.client.adapters.parts import group_of
from tokengrove.errors import InvalidRequest


def test_verl_pads_the_prompt_on_the_left_and_the_response_on_the_right() -> None:
    batch = verl.padded([sample([1, 2, 3, 4], [5, 6])], prompt_length=8, response_length=3).batch
    assert batch["prompts"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4]]
    assert batch["responses"].tolist() == [[5, 6, 0]]
    assert batch["response_mask"].tolist() == [[1, 1, 0]]
    assert batch["attention_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 5]]
    assert batch["rollout_log_probs"].tolist() == [[-1.25, -1.5, 0.0]]


def test_verls_small_case_has_its_reward_at_the_last_response_token() -> None:
    result = verl.padded([sample([10, 11], [20, 21], reward=0.25)])
    assert result.batch["input_ids"].tolist() == [[10, 11, 20, 21]]
    assert result.batch["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert result.batch["rm_scores"].tolist() == [[0.0, 0.25]]
    floats = {"rollout_log_probs", "rm_scores", "returns", "token_rewards", "weight"}
    dtypes = {name: np.float32 if name in floats else np.int64 for name in result.batch}
    assert {name: column.dtype for name, column in result.batch.items()} == {n: np.dtype(d) for n, d in dtypes.items()}


def test_a_tool_result_is_in_verls_response_and_not_trained() -> None:
    agent = chain([([1, 2], [3]), ([8, 9], [4, 5])], rewards=[0.5, 1.0])
    result = verl.padded([agent, sample([1], [2], reward=3.0, session="t")], pad_token_id=7)
    assert result.batch["prompts"].tolist() == [[1, 2], [7, 1]]
    assert result.batch["responses"].tolist() == [[3, 8, 9, 4, 5], [2, 7, 7, 7, 7]]
    assert result.batch["response_mask"].tolist() == [[1, 0, 0, 1, 1], [1, 0, 0, 0, 0]]
    assert result.batch["rm_scores"].tolist() == [[0, 0, 0, 0, 1.5], [3.0, 0, 0, 0, 0]]
    assert result.batch["rollout_log_probs"][0].tolist() == [-0.75, 0.0, 0.0, -1.0, -1.25]
    turns = result.non_tensor_batch["__num_turns__"]
    assert (turns.dtype, turns.tolist()) == (np.dtype(np.int32), [4, 2])  # user, answer, tool, answer; and user, answer
    assert result.non_tensor_batch["uid"].tolist() == ["s", "t"]


def test_tokens_that_another_sample_trains_still_belong_to_the_response() -> None:
    shared = chain([([1], [2]), ([3], [4])], rewards=[0.0, 1.0])
    shared.loss_mask[1] = 0
    batch = verl.padded([shared]).batch
    assert (batch["prompts"].tolist(), batch["response_mask"].tolist()) == ([[1]], [[0, 0, 1]])


def test_a_sample_too_long_for_verl_is_refused_dropped_or_truncated_with_its_reward() -> None:
    long, short = sample([1, 2, 3], [4, 5, 6], reward=2.0, session="long"), sample([7], [8], session="short")
    with pytest.raises(InvalidRequest, match=r"long-0.*3 tokens of prompt and 3 of response"):
        verl.padded([long, short], prompt_length=2, response_length=2)
    dropped = verl.padded([long, short], prompt_length=2, response_length=2, on_too_long="drop")
    assert dropped.non_tensor_batch["session_id"].tolist() == ["short"]
    cut = verl.padded([long, short], prompt_length=2, response_length=2, on_too_long="truncate").batch
    assert cut["prompts"].tolist() == [[2, 3], [0, 7]]
    assert cut["responses"].tolist() == [[4, 5], [8, 0]]
    assert cut["rm_scores"].tolist() == [[0.0, 2.0], [0.0, 0.0]]


def test_a_sample_in_which_nothing_was_sampled_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="s-0"):
        verl.padded([sample([1, 2], [])])


def test_roll_has_the_score_at_the_last_real_token_and_logprobs_shifted_by_one() -> None:
    agent = chain([([1, 2], [3]), ([8], [4, 5])], rewards=[0.5, 1.0], group="g")
    fields = roll.trajectories([agent], sequence_length=8, pad_token_id=9)
    batch = fields.batch
    assert batch["input_ids"].tolist() == [[1, 2, 3, 8, 4, 5, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 0]]
    assert batch["response_mask"].tolist() == [[False, False, True, False, True, True, False, False]]
    assert batch["prompt_mask"].tolist() == [[True, True] + [False] * 6]
    assert batch["scores"].tolist() == [[0, 0, 0, 0, 0, 1.5, 0, 0]]
    assert batch["infer_logprobs"].tolist() == [[0, -0.75, 0, -1.0, -1.25, 0, 0]]
    assert batch["versions"].tolist() == [[-1, -1, 0, -1, 1, 1, -1, -1]]
    dtypes = {name: column.dtype.name for name, column in batch.items()}
    assert dtypes == {
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), "int64"),
        **dict.fromkeys(("response_mask", "prompt_mask"), "bool"),
        **dict.fromkeys(("scores", "infer_logprobs", "returns", "token_rewards"), "float32"),
        **dict.fromkeys(("weight", "step_rewards"), "float32"),
        "versions": "int32",
    }
    assert fields.non_tensor_batch["step_scores"][0] == [0.5, 1.0]
    assert fields.non_tensor_batch["episode_scores"].tolist() == [1.5]
    assert fields.non_tensor_batch["group_ids"].tolist() == ["g"]


def test_all_of_rolls_steps_of_one_session_share_its_traj_id_and_keep_raw_scores() -> None:
    first = replace(sample([1], [2], reward=0.5, score=1.5), rewards=np.array([1.4], np.float32))  # its return
    second = sample([1, 2, 3], [4], reward=1.0, score=1.5, interaction_id="s-1", interaction_ids=["s-1"])
    other = sample([5], [6], reward=2.0, session="t")
    fields = roll.steps([first, second, other])
    assert fields.batch["scores"].tolist() == [[0, 0.5, 0, 0], [0, 0, 0, 1.0], [0, 2.0, 0, 0]]
    others = fields.non_tensor_batch
    assert others["traj_id"].tolist() == ["s", "s", "t"]
    assert others["step"].tolist() == [0, 1, 0]
    assert others["episode_scores"].tolist() == [1.5, 1.5, 2.0]
    assert others["state_hash"].tolist() == ["h0", "h0", "h0"]


def test_rolls_steps_are_single_turns_and_fit() -> None:
    with pytest.raises(InvalidRequest, match="individual"):
        roll.steps([chain([([1], [2]), ([3], [4])], rewards=[0, 0])])
    with pytest.raises(InvalidRequest, match="sequence_length 3"):
        roll.trajectories([sample([1, 2], [3, 4])], sequence_length=3)
    assert roll.trajectories([sample([1, 2], [3, 4])], sequence_length=4).batch["input_ids"].tolist() == [[1, 2, 3, 4]]


def test_rolls_prompt_ends_at_the_first_sampled_token_trained_or_not_and_is_all_where_there_is_none() -> None:
    untrained = chain([([1, 2], [3]), ([4], [5])], rewards=[0.0, 0.0], trained=False)
    batch = roll.trajectories([untrained, roll.placeholder("t")]).batch
    assert not batch["response_mask"].any()
    assert batch["prompt_mask"].tolist() == [[True, True, False, False, False], [True, False, False, False, False]]


def test_rolls_metrics_are_means_over_sessions_not_over_their_rows() -> None:
    first = sample([1], [2], reward=0.5, score=1.5)
    second = sample([1, 2, 3], [4], reward=1.0, score=1.5, interaction_id="s-1", interaction_ids=["s-1"])
    metrics = roll.steps([first, second, sample([5], [6], session="t")]).meta_info["metrics"]
    assert metrics["env//num_branches_or_steps"] == (2 + 1) / 2
    assert metrics["env//total_tokens"] == ((2 + 4) + 2) / 2
    assert metrics["env//episode_score"] == (1.5 + 0.0) / 2


def test_areal_gets_its_entries_by_interaction_id() -> None:
    entries = areal.interactions([sample([1, 2], [3], reward=0.81)])
    assert list(entries) == ["s-0"]
    entry = entries["s-0"]
    assert (entry["interaction_id"], entry["reward"]) == ("s-0", pytest.approx(0.81))
    names = {"input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards"}
    assert set(entry["tensor_dict"]) == names
    assert entry["tensor_dict"]["input_ids"].tolist() == [[1, 2, 3]]


def test_areals_own_class_is_filled_as_areal_fills_it() -> None:
    torch = pytest.importorskip("torch")

    class InteractionWithTokenLogpReward:
        pass

    [filled] = areal.fill([sample([1], [2], reward=1.0)], InteractionWithTokenLogpReward).values()
    assert (filled.reward, filled.interaction_id) == (1.0, "s-0")
    assert filled._cache["input_ids"].dtype == filled._cache["versions"].dtype == torch.int64


def test_advantages_are_relative_to_the_group_with_the_populations_deviation() -> None:
    assert trl.advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1.0, -1.0, -1.0, 1.0])
    assert trl.advantages([3.0, 3.0]) == [0.0, 0.0]
    assert trl.advantages([4.0, 1.0, 1.0])[0] == pytest.approx(2 / np.std([4.0, 1.0, 1.0]))


def test_a_rollout_without_a_reward_is_not_counted_by_trl() -> None:
    assert trl.advantages([1.0, None, 0.0]) == pytest.approx([1.0, 0.0, -1.0])
    assert trl.advantages([None, None]) == [0.0, 0.0]


@dataclass
class Row:
    """TRL's `RolloutSample`, which is not installed here."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]


def test_every_row_of_a_session_has_the_advantage_of_its_score_in_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "library", lambda name: SimpleNamespace(RolloutSample=Row))
    title, episode = (
        sample([1], [2], session="success", group="g", score=1.0, interaction_id=name) for name in ("title", "episode")
    )
    failure = sample([1], [2], session="failure", group="g", score=0.0)
    unscored = sample([1], [2], session="unscored", group="g", score=None, rewarded=False)
    alone = sample([1], [2], session="alone", task_id="task", score=5.0)
    rows = trl.rollout_samples([title, episode, failure, unscored, alone])
    assert [(row.group_id, row.advantage) for row in rows] == [
        (0, pytest.approx(1.0)),
        (0, pytest.approx(1.0)),
        (0, pytest.approx(-1.0)),
        (0, 0.0),
        (1, 0.0),
    ]
    assert [row.metrics["reward"] for row in rows[:3]] == [1.0, 1.0, 0.0] and math.isnan(rows[3].metrics["reward"])


def test_each_path_counts_in_trl_where_the_scope_is_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "library", lambda name: SimpleNamespace(RolloutSample=Row))
    paths = [
        sample([1], [2], interaction_id=f"i{at}", score=score, reward_scope="path")
        for at, score in enumerate((1.0, 0.0, 0.0, 1.0))
    ]
    assert [row.advantage for row in trl.rollout_samples(paths)] == pytest.approx([1.0, -1.0, -1.0, 1.0])


def test_samples_of_one_task_are_a_group_if_their_sessions_have_none() -> None:
    samples = [sample([1], [2], session=name, task_id="task") for name in ("a", "b")]
    assert verl.padded(samples).non_tensor_batch["uid"].tolist() == ["task", "task"]
    named = sample([1], [2], group="g", task_id="task")
    assert verl.padded([named]).non_tensor_batch["uid"].tolist() == ["g"]


def test_agents_of_one_group_are_groups_of_their_own_for_trainers_that_compare() -> None:
    """verl's `uid`, ROLL's `traj_group_id` and TRL's groups: a planner is not compared with a coder."""
    rows = [
        sample([1], [2], session_id=f"s{at}", group_id="g", agent=agent, score=score, rewarded=True, reward_scope=scope)
        for scope in ("agent", "session")
        for at, (agent, score) in enumerate((("planner", 1.0), ("coder", 8.0)))
    ]
    assert [group_of(row) for row in rows] == ["g@planner", "g@coder", "g", "g"]
    assert [trl._group(row) for row in rows] == ["g@planner", "g@coder", "g", "g"]


def test_arts_results_share_the_prompt_of_their_group_but_for_its_last_token() -> None:
    how: dict[str, Any] = {"group": "g", "advantages": [0.5]}
    one = chain([([1, 2, 3], [4, 5]), ([8], [6])], rewards=[0.0, 1.0], session="a", **how)
    other = sample([1, 2, 3], [4], session="b", **how)
    found = art.tokenized_results([one, other, sample([9], [7], session="c", advantages=[1.0])])
    assert [(each["prompt_id"], each["prompt_length"]) for each in found] == [(1, 2), (1, 2), (2, 0)]
    assert found[0]["token_ids"] == [1, 2, 3, 4, 5, 8, 6] and found[0]["input_pos"] == list(range(7))
    assert found[0]["assistant_mask"] == [0, 0, 0, 1, 1, 0, 1] and found[0]["choice_offsets"] == [3, 6]
    assert found[0]["logprobs"][3:5] == [-1.0, -1.25] and math.isnan(found[0]["logprobs"][5])
    assert [each["weight"] for each in found] == [1 / 3, 1.0, 1.0]
    assert [each["advantage"] for each in found] == [0.5, 0.5, 1.0]


def test_art_needs_advantages_and_gets_no_sample_without_trained_tokens() -> None:
    untrained = chain([([1], [2])], rewards=[0.0], trained=False, advantages=[1.0])
    assert art.tokenized_results([untrained]) == []
    with pytest.raises(InvalidRequest, match="export with 'advantages'"):
        art.tokenized_results([sample([1], [2])])
