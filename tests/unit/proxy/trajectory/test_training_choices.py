"""The caller selects the turns to train; turns that are not selected stay in place as context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import export_session, lay_out
from proxy.trajectory.main_reward import MainReward
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tokengrove.options.export import Granularity, Layout, TrainSelection, TurnSelection
from tokengrove.options.session import Purpose

RECORD = SessionRecord("s", discount=1.0)


def fork() -> list[Interaction]:
    """root [1]->[2], a [..3]->[4], b [..5]->[6]: a and b continue root; side is another root, a title call."""
    nodes = [
        interaction("root", suffix=[1], output=[2], seq=0),
        interaction("a", parent="root", prefix=2, suffix=[3], output=[4], seq=1, reward=1.0),
        interaction("b", parent="root", prefix=2, suffix=[5], output=[6], seq=2),
        interaction("side", suffix=[7], output=[8], seq=3),
    ]
    nodes[3].purpose, nodes[2].agent = "title", "helper"
    return nodes


def masks(train: TrainSelection, layout: Layout = Layout.CONCAT) -> dict[str, list[int]]:
    samples = export_session(RECORD, fork(), LayoutOptions(layout=layout, train=train))
    return {sample.last.id: sample.arrays.loss_mask.tolist() for sample in samples}


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (TrainSelection(), {"a": [0, 1, 0, 1], "b": [0, 0, 0, 1], "side": [0, 1]}),
        (TrainSelection(turns=TurnSelection.LAST), {"a": [0, 0, 0, 1], "b": [0, 0, 0, 1], "side": [0, 1]}),
        (TrainSelection(turns=frozenset({0})), {"a": [0, 1, 0, 0], "b": [0, 0, 0, 0], "side": [0, 1]}),
        (TrainSelection(turns=frozenset({1})), {"a": [0, 0, 0, 1], "b": [0, 0, 0, 1], "side": [0, 0]}),
        (TrainSelection(turns=frozenset({5})), {"a": [0, 0, 0, 0], "b": [0, 0, 0, 0], "side": [0, 0]}),
        (TrainSelection(purposes=frozenset({"main"})), {"a": [0, 1, 0, 1], "b": [0, 0, 0, 1], "side": [0, 0]}),
        (TrainSelection(agents=frozenset({"helper"})), {"a": [0, 0, 0, 0], "b": [0, 0, 0, 1], "side": [0, 0]}),
        (TrainSelection(exclude=frozenset({"root", "side"})), {"a": [0, 0, 0, 1], "b": [0, 0, 0, 1], "side": [0, 0]}),
    ],
)
def test_turns_that_are_not_selected_are_context(train: TrainSelection, expected: dict[str, list[int]]) -> None:
    assert masks(train) == expected


def test_individual_and_tree_train_the_same_turns_as_concat() -> None:
    train = TrainSelection(turns=TurnSelection.LAST)
    assert masks(train, Layout.INDIVIDUAL) == {"root": [0, 0], "a": [0, 0, 0, 1], "b": [0, 0, 0, 1], "side": [0, 1]}
    (row,) = lay_out(RECORD, fork(), LayoutOptions(layout=Layout.TREE, train=train)).rows
    assert row.columns()["loss_mask"].tolist() == [0, 0, 0, 1, 0, 1, 0, 1]


def test_context_has_neither_logprob_nor_version() -> None:
    first = export_session(
        RECORD, fork(), LayoutOptions(layout=Layout.CONCAT, train=TrainSelection(turns=TurnSelection.LAST))
    )[0]
    assert first.arrays.logprobs.tolist() == [0, 0, 0, -0.5]
    assert first.arrays.versions.tolist() == [-1, -1, -1, 0]
    assert first.arrays.turn_ids.tolist() == [-1, -1, -1, 1]


def test_weights_of_a_session_add_up_to_one_over_trained_samples() -> None:
    rows = lay_out(RECORD, fork(), LayoutOptions(layout=Layout.CONCAT)).rows
    assert [row.columns()["weight"].tolist() for row in rows] == [pytest.approx([1 / 3])] * 3
    rows = lay_out(RECORD, fork(), LayoutOptions(layout=Layout.CONCAT, train=TrainSelection(turns=frozenset({1})))).rows
    assert [row.columns()["weight"].tolist() for row in rows] == [[0.5], [0.5], [0.0]]


@pytest.mark.parametrize(("finished", "trained"), [(False, 0), (True, 4), (None, 4)])
def test_unfinished_sessions_may_be_masked(finished: bool | None, trained: int) -> None:
    record = replace(RECORD, finished=finished)
    samples = export_session(record, fork(), LayoutOptions(layout=Layout.CONCAT, mask_unfinished=True))
    assert sum(int(sample.arrays.loss_mask.sum()) for sample in samples) == trained
    kept = export_session(record, fork(), LayoutOptions(layout=Layout.CONCAT))
    assert sum(int(sample.arrays.loss_mask.sum()) for sample in kept) == 4


def rewarded() -> list[Interaction]:
    nodes = [interaction("a", seq=0, reward=0.25), interaction("b", parent="a", prefix=2, seq=1, reward=0.5)]
    nodes[0].rewards, nodes[1].rewards = {"style": 3.0, "pass_rate": 1.0}, {}
    return nodes


@pytest.mark.parametrize(
    ("reward", "main"),
    [
        (MainReward(), [0.25, 0.5]),
        (MainReward("style"), [3.0, 0.5]),
        (MainReward("unheard of"), [0.25, 0.5]),
        (MainReward.at(Granularity.PASS_RATE), [1.0, 0.5]),
        (MainReward.at(Granularity.BINARY), [0.25, 0.5]),
    ],
)
def test_the_main_reward_falls_back_to_the_raw_one(reward: MainReward, main: list[float]) -> None:
    nodes = rewarded()
    (sample,) = export_session(RECORD, nodes, LayoutOptions(layout=Layout.CONCAT, discount=0.5, reward=reward))
    assert [turn["reward"] for turn in sample.labels()["turns"]] == main
    assert sample.rewards.tolist() == [sum(main)] and sample.raw_rewards.tolist() == [main[1]]
    assert sample.returns == (main[0] + 0.5 * main[1], main[1])
    assert [node.reward for node in nodes] == [0.25, 0.5]


def main_rewards(reward: MainReward, metrics: dict[str, object], *, raw: bool = True) -> list[float | None]:
    """The main rewards of the two turns of `rewarded`; with `raw` False, of turns without any reward."""
    nodes = rewarded()
    for node in nodes if not raw else ():
        node.reward, node.rewards = None, {}
    return list(reward.of(nodes, metrics, {node.id: Purpose.MAIN for node in nodes}).values())


@pytest.mark.parametrize(
    ("reward", "metrics", "main"),
    [
        # As ROLL selects an episode's score: the metric of that name, else the score.
        (MainReward.at(Granularity.PASS_RATE), {"pass_rate": 0.25}, [None, 0.25]),
        (MainReward.at(Granularity.BINARY), {"binary": 0, "pass_rate": 0.25}, [None, 0.0]),
        (MainReward.at(Granularity.BINARY), {"pass_rate": 0.25}, [0.25, 0.5]),
        # By name: turns first, then the metrics.
        (MainReward("style"), {"style": 9.0}, [3.0, 0.5]),
        (MainReward("checks"), {"checks": True}, [None, 1.0]),
        (MainReward("checks"), {"checks": "all"}, [0.25, 0.5]),
        (MainReward(), {"pass_rate": 0.25}, [0.25, 0.5]),
    ],
)
def test_a_metric_is_the_reward_of_its_session(
    reward: MainReward, metrics: dict[str, object], main: list[float | None]
) -> None:
    assert main_rewards(reward, metrics) == main
    record = replace(RECORD, metrics=metrics)
    (sample,) = export_session(record, rewarded(), LayoutOptions(layout=Layout.CONCAT, discount=0.5, reward=reward))
    assert [turn["reward"] for turn in sample.labels()["turns"]] == main
    assert sample.rewards.tolist() == [sum(value or 0.0 for value in main)]


def test_a_missing_reward_is_none_in_any_granularity_and_a_metric_counts_once() -> None:
    for granularity in Granularity:
        assert main_rewards(MainReward.at(granularity), {}, raw=False) == [None, None]
        assert main_rewards(MainReward.at(granularity), {granularity: 0.5}, raw=False) == [None, 0.5]
    assert MainReward.at(Granularity.PASS_RATE).of([], {"pass_rate": 1}, {}) == {}


def test_a_metric_of_an_unrewarded_session_rewards_the_main_agents_last_turn() -> None:
    nodes = rewarded()
    nodes[0].reward = nodes[1].reward = None
    title = {"a": "main", "b": "title"}
    assert MainReward("checks").of(nodes, {"checks": 1.0}, title) == {"a": 1.0, "b": None}
    assert MainReward("checks").of(nodes, {"checks": 1.0}, dict.fromkeys("ab", "title")) == {"a": None, "b": 1.0}


def test_token_rewards_are_at_their_tokens_and_absent_without_any() -> None:
    nodes = rewarded()
    assert "token_rewards" not in export_session(RECORD, nodes, LayoutOptions(layout=Layout.CONCAT))[0].columns()
    nodes[1].output_ids, nodes[1].logprobs = nodes[1].output_ids * 2, nodes[1].logprobs * 2
    nodes[1].versions = ((2, 0),)
    nodes[1].token_rewards = nodes[1].logprobs[:1] + nodes[1].logprobs[:0]
    nodes[1].token_rewards.append(2.0)
    columns = export_session(RECORD, nodes, LayoutOptions(layout=Layout.CONCAT))[0].columns()
    assert columns["token_rewards"].tolist() == [0, 0, 0, -0.5, 2.0] and columns["token_rewards"].dtype == "float32"
