"""What each sample of a session is rewarded with, in small trees drawn by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxy.trajectory.advantages import Groups, group_of
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.main_reward import MainReward
from proxy.trajectory.scored_session import scored_session
from proxy.trajectory.scores import Compared
from proxy.trajectory.session_samples import SessionSamples
from proxy.trajectory.summary import certificate
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tokengrove.options.export import Baseline, Layout, Padding, TrainSelection, Unrewarded
from tokengrove.options.session import Outcome, RewardScope, SessionStatus
from tokengrove.reasons import Reason

PADDED = Padding(prompt_length=8, response_length=16)
JOINED = (Layout.CONCAT, Layout.PADDED)
ENDED = SessionStatus.ENDED


def turns(
    *drawn: tuple[str, str | None, float | None], purposes: dict[str, str] | None = None, seconds: float = 100.0
) -> list[Interaction]:
    """Turns of (name, parent, reward) in order of completion. A name that ends in a digit answers the prompt of the
    other names that differ only in that digit. One begins each second and takes so many `seconds`, so with more than
    one they overlap."""
    made: list[Interaction] = []
    lengths = {None: 0}
    for seq, (name, parent, reward) in enumerate(drawn):
        node = interaction(name, parent=parent, prefix=lengths[parent], seq=seq, reward=reward)
        node.created_at, node.completed_at = float(seq), seq + seconds
        node.state_hash = name.rstrip("0123456789")
        node.purpose = (purposes or {}).get(name, "main")
        asked_before = [other for other in made if (other.parent_id, other.state_hash) == (parent, node.state_hash)]
        node.reason = Reason.RESAMPLED if asked_before else node.reason
        lengths[name] = lengths[parent] + 2
        made.append(node)
    return made


# A title call, an episode and what follows its compaction: one success, whose reward is on the last turn.
SUCCESS = turns(
    ("title", None, None),
    ("a", None, None),
    ("b", "a", None),
    ("compacted", None, None),
    ("c", "compacted", 1.0),
    purposes={"title": "title"},
)
# Four answers to one prompt, each rewarded by itself.
BEST_OF_4 = turns(("a", None, None), ("x1", "a", 1.0), ("x2", "a", 0.0), ("x3", "a", 0.0), ("x4", "a", 1.0))


def options(layout: Layout, **more: Any) -> LayoutOptions:
    return LayoutOptions(layout=layout, padding=PADDED if layout is Layout.PADDED else None, **more)


def laid(nodes: Sequence[Interaction], chosen: LayoutOptions, **record: Any) -> SessionSamples:
    session = SessionRecord("s", status=ENDED, **record)
    scored, groups = scored_session(session, nodes, chosen), Groups()
    groups.add(group_of("s", session.group_id), scored.values(), scored.steps())
    groups.note_scope(group_of("s", session.group_id), scored.scores.scope, "s")
    return lay_out(session, nodes, chosen, groups)


def rewards(found: SessionSamples) -> list[float]:
    return [float(row.columns()["rewards"][0]) for row in found.rows]


def test_every_sample_of_a_session_has_the_sessions_score() -> None:
    for layout in JOINED:
        found = laid(SUCCESS, options(layout))
        assert rewards(found) == [1.0, 1.0, 1.0]
        assert [row.labels()["rewarded"] for row in found.rows] == [True, True, True]
        assert (found.entry["reward_scope"], found.entry["score"]) == ("session", 1.0)
    assert rewards(laid(SUCCESS, options(Layout.TREE))) == [1.0]


def test_scope_path_sums_the_rewards_of_each_path() -> None:
    for layout in JOINED:
        found = laid(SUCCESS, options(layout, reward_scope=RewardScope.PATH))
        assert rewards(found) == [0.0, 0.0, 1.0]
        assert [row.labels()["rewarded"] for row in found.rows] == [False, False, True]
        assert (found.entry["reward_scope"], found.entry["score"]) == ("path", 1.0)


def test_a_reward_of_a_turn_that_paths_share_counts_once() -> None:
    fork = turns(("a", None, 0.5), ("b", "a", 1.0), ("c", "a", 0.25))
    for layout in (*JOINED, Layout.TREE):
        assert set(rewards(laid(fork, options(layout)))) == {1.75}
    assert rewards(laid(fork, options(Layout.CONCAT, reward_scope=RewardScope.PATH))) == [1.5, 0.75]


def test_layout_individual_keeps_returns() -> None:
    for scope in RewardScope:
        assert rewards(laid(SUCCESS, options(Layout.INDIVIDUAL, reward_scope=scope), discount=0.5)) == [0, 0, 0, 0.5, 1]


def test_siblings_that_were_rewarded_each_by_itself_keep_their_difference() -> None:
    for layout in JOINED:
        found = laid(BEST_OF_4, options(layout))
        assert rewards(found) == [1.0, 0.0, 0.0, 1.0]
        assert (found.entry["reward_scope"], found.entry["score"]) == ("path", 0.5)
        assert {row.labels()["reward_scope"] for row in found.rows} == {"path"}


def test_advantages_of_siblings_compare_the_branches() -> None:
    values = np.array([1.0, 0.0, 0.0, 1.0])
    expected = (values - 0.5) / (values.std(ddof=1) + 1e-6)
    compared = {"advantages": Baseline.GRPO, "unrewarded": Unrewarded.SKIP}
    found = laid(BEST_OF_4, options(Layout.CONCAT, **compared))
    assert [float(row.columns()["advantages"][0]) for row in found.rows] == pytest.approx(expected.tolist())
    assert found.entry["group_members"] == 4
    single = laid(BEST_OF_4, options(Layout.INDIVIDUAL, **compared))  # the first turn stands on all four branches
    advantages = [float(row.columns()["advantages"][0]) for row in single.rows]
    assert advantages == pytest.approx([0.0, *expected.tolist()])


def test_a_branch_without_a_reward_is_no_member_of_its_group() -> None:
    nodes = turns(("a", None, None), ("x1", "a", 1.0), ("x2", "a", 0.25), ("x3", "a", None))
    compared = {"advantages": Baseline.LEAVE_ONE_OUT, "unrewarded": Unrewarded.SKIP}
    found = laid(nodes, options(Layout.CONCAT, **compared))
    assert found.entry["group_members"] == 2
    assert [float(row.columns()["advantages"][0]) for row in found.rows] == [0.75, -0.75]


def test_a_sample_on_several_branches_has_the_mean_of_their_advantages() -> None:
    nodes = turns(("x1", None, None), ("x2", None, 0.0), ("b", "x1", 1.0), ("c", "x1", 0.5))
    found = laid(nodes, options(Layout.INDIVIDUAL, advantages=Baseline.LEAVE_ONE_OUT))
    assert [float(row.columns()["advantages"][0]) for row in found.rows] == [0.375, -0.75, 0.75, 0.0]


@pytest.mark.parametrize(
    "nodes",
    [
        turns(("a", None, None), ("x1", "a", None), ("x2", "a", 1.0)),  # one answer was thrown away
        turns(("a", None, None), ("x", "a", 1.0), ("y", "a", 0.0)),  # two prompts
        turns(("a1", None, 1.0), ("b", "a1", None), ("a2", "b", 0.0)),  # the same words again, later
    ],
    ids=["one rewarded", "two prompts", "below each other"],
)
def test_other_turns_share_the_sessions_score(nodes: list[Interaction]) -> None:
    found = laid(nodes, options(Layout.CONCAT))
    assert (set(rewards(found)), found.entry["reward_scope"]) == ({1.0}, "session")


def test_the_same_words_under_other_tools_are_no_second_answer() -> None:
    nodes = turns(("a1", None, 1.0), ("a2", None, 0.5))
    nodes[1].reason = Reason.TOOLS_CHANGED
    found = laid(nodes, options(Layout.CONCAT))
    assert (rewards(found), found.entry["reward_scope"]) == ([1.5, 1.5], "session")


def test_a_reward_below_a_sibling_is_its_own() -> None:
    nodes = turns(("x1", None, None), ("x2", None, None), ("b", "x1", 1.0), ("c", "x2", 0.25))
    assert rewards(laid(nodes, options(Layout.CONCAT))) == [1.0, 0.25]


def test_a_filter_selects_whose_rewards_are_summed_unless_it_selects_none() -> None:
    nodes = turns(("red", None, 1.0), ("blue", None, -1.0))
    for node in nodes:
        node.agent = node.id
    for name, score in (("red", 1.0), ("blue", -1.0)):
        assert rewards(laid(nodes, options(Layout.CONCAT, agents=frozenset({name})))) == [score]
    misplaced = turns(("a", None, None), ("title", None, 1.0), purposes={"title": "title"})
    assert rewards(laid(misplaced, options(Layout.CONCAT, purposes=frozenset({"main"})))) == [1.0]
    assert rewards(laid(misplaced, options(Layout.TREE, purposes=frozenset({"main"})))) == [1.0]


def test_branches_without_a_turn_to_train_are_not_compared() -> None:
    nodes = turns(("title", None, 9.0), ("x1", None, 1.0), ("x2", None, 0.0), purposes={"title": "title"})
    main = TrainSelection(purposes=frozenset({"main"}))
    found = laid(nodes, options(Layout.CONCAT, advantages=Baseline.LEAVE_ONE_OUT, train=main))
    assert [float(row.columns()["advantages"][0]) for row in found.rows] == [0.0, 1.0, -1.0]
    assert found.entry["group_members"] == 2


def test_a_turn_that_is_not_trained_has_step_advantage_0_beside_those_of_its_state() -> None:
    nodes = turns(("x1", None, 1.0), ("x2", None, 0.25), ("x3", None, 0.0))
    without = TrainSelection(exclude=frozenset({"x2"}))
    found = laid(nodes, options(Layout.CONCAT, step_advantages=Baseline.LEAVE_ONE_OUT, train=without))
    assert [row.columns()["step_advantages"].tolist() for row in found.rows] == [[1.0], [0.0], [-1.0]]


def test_a_turn_of_an_unrewarded_branch_is_no_step_of_its_state() -> None:
    nodes = turns(("x1", None, 1.0), ("x2", None, 0.5), ("x3", None, None))
    skipping = options(Layout.CONCAT, step_advantages=Baseline.LEAVE_ONE_OUT, unrewarded=Unrewarded.SKIP)
    assert [row.columns()["step_advantages"].tolist() for row in laid(nodes, skipping).rows] == [[0.5], [-0.5]]


def test_a_tree_of_siblings_has_the_sum_of_their_rewards() -> None:
    assert rewards(laid(BEST_OF_4, options(Layout.TREE))) == [2.0]


def test_a_session_that_is_left_out_does_not_warn_that_it_is_alone() -> None:
    for reward, number in ((1.0, 1), (None, 0)):
        chosen = options(Layout.CONCAT, advantages=Baseline.GRPO, unrewarded=Unrewarded.SKIP)
        session, groups = SessionRecord("s", status=ENDED), Groups()
        groups.add(group_of("s", None), [Compared(1.0, None)], [])
        found = lay_out(session, turns(("a", None, reward)), chosen, groups)
        assert len(found.counts(chosen)["warnings"]) == number


@pytest.mark.parametrize("given", [{"reward": 0.0}, {"rewards": {"style": 0.0}}, {"token_rewards": array("f", [0.0])}])
def test_a_reward_of_any_kind_makes_a_session_rewarded(given: dict[str, Any]) -> None:
    node = interaction("a")
    assert not certificate(SessionRecord("s"), [node])["rewarded"]
    assert certificate(SessionRecord("s"), [replace(node, **given)])["rewarded"]


@pytest.mark.parametrize(
    ("record", "reward", "reason"),
    [
        ({"status": SessionStatus.ACTIVE}, 1.0, "active"),
        ({"status": ENDED, "outcome": Outcome.FAILED}, 1.0, "failed"),
        ({"status": ENDED}, None, "unrewarded"),
        ({"status": SessionStatus.EXPIRED}, None, "unrewarded"),
        ({"status": SessionStatus.EXPIRED}, 0.0, None),
        ({"status": ENDED, "outcome": Outcome.TIMEOUT}, 0.0, None),
    ],
)
@pytest.mark.parametrize("layout", list(Layout))
def test_a_session_without_a_final_score_is_left_out_or_counts_0(
    record: dict[str, Any], reward: float | None, reason: str | None, layout: Layout
) -> None:
    session, nodes = SessionRecord("s", **record), turns(("a", None, None), ("b", "a", reward))
    skipping = options(layout, unrewarded=Unrewarded.SKIP)
    found = lay_out(session, nodes, skipping)
    assert found.entry["left_out"] == reason and bool(found.rows) == (reason is None)
    assert scored_session(session, nodes, skipping).values() == ([] if reason else [(reward, None)])
    kept = lay_out(session, nodes, options(layout))
    assert (kept.entry["left_out"], bool(kept.rows)) == (None, True)
    assert [row.labels()["rewarded"] for row in kept.rows] == [reward is not None] * len(kept.rows)
    assert scored_session(session, nodes, options(layout)).values() == [(reward or 0.0, None)]


def test_an_unrewarded_branch_is_left_out_and_the_next_one_trains_what_they_share() -> None:
    nodes = turns(("a", None, None), ("x1", "a", None), ("x2", "a", 1.0), ("x3", "a", 0.0))
    found = laid(nodes, options(Layout.CONCAT, unrewarded=Unrewarded.SKIP))
    assert (rewards(found), found.unrewarded) == ([1.0, 0.0], 1)
    assert [row.columns()["loss_mask"].tolist() for row in found.rows] == [[0, 1, 0, 1], [0, 0, 0, 1]]
    single = laid(nodes, options(Layout.INDIVIDUAL, unrewarded=Unrewarded.SKIP))
    assert [row.labels()["interaction_id"] for row in single.rows] == ["a", "x2", "x3"]


# An agent without memory observes a wall twice: each request is the current observation only.
WALL = turns(("a", None, 1.0), ("wall1", None, 1.0), ("wall2", None, 1.0), seconds=1.0)


def warned(found: SessionSamples, chosen: LayoutOptions) -> str:
    return "; ".join(found.counts(chosen)["warnings"])


@pytest.mark.parametrize("layout", [*JOINED, Layout.TREE])
def test_answers_to_one_prompt_one_after_the_other_are_steps_of_the_episode(layout: Layout) -> None:
    found = laid(WALL, chosen := options(layout))
    assert set(rewards(found)) == {3.0}
    assert (found.entry["reward_scope"], found.entry["score"]) == ("session", 3.0)
    assert "wall1 and wall2" in (told := warned(found, chosen)) and "'reward_scope': path" in told


def test_an_episode_that_observes_the_same_twice_has_the_advantage_of_one_that_does_not() -> None:
    chosen, groups = options(Layout.CONCAT, advantages=Baseline.LEAVE_ONE_OUT), Groups()
    episodes = {"once": turns(("a", None, 1.0), ("b", None, 1.0), ("c", None, 1.0), seconds=1.0), "twice": WALL}
    for name, nodes in episodes.items():
        groups.add("g", scored_session(SessionRecord(name, group_id="g"), nodes, chosen).values(), [])
    for name, nodes in episodes.items():
        found = lay_out(SessionRecord(name, group_id="g"), nodes, chosen, groups)
        assert [row.columns()["advantages"].tolist() for row in found.rows] == [[0.0]] * 3


def test_a_scope_that_is_asked_for_ends_the_warning_and_comes_before_the_tree() -> None:
    for how, expected in ((RewardScope.PATH, [1.0, 1.0, 1.0]), (RewardScope.SESSION, [3.0, 3.0, 3.0])):
        by_export, by_start = options(Layout.CONCAT, reward_scope=how), options(Layout.CONCAT)
        assert (rewards(laid(WALL, by_export)), warned(laid(WALL, by_export), by_export)) == (expected, "")
        found = laid(WALL, by_start, reward_scope=how)
        assert (rewards(found), found.entry["reward_scope"], warned(found, by_start)) == (expected, how, "")
    both = laid(WALL, options(Layout.CONCAT, reward_scope=RewardScope.SESSION), reward_scope=RewardScope.PATH)
    assert rewards(both) == [3.0, 3.0, 3.0]
    assert rewards(laid(BEST_OF_4, options(Layout.CONCAT, reward_scope=RewardScope.SESSION))) == [2.0] * 4


def test_answers_that_overlapped_are_alternatives_and_the_entry_warns() -> None:
    found = laid(BEST_OF_4, chosen := options(Layout.CONCAT))
    assert found.entry["reward_scope"] == "path"
    assert "x1 and x2" in (told := warned(found, chosen)) and "'reward_scope': session" in told


def test_one_answer_that_overlapped_with_an_earlier_one_makes_all_answers_alternatives() -> None:
    nodes = turns(("x1", None, 1.0), ("x2", None, 0.5), ("x3", None, 0.0), seconds=1.0)
    nodes[0].completed_at = 2.5  # while the third was sampled
    assert rewards(laid(nodes, options(Layout.CONCAT))) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("below", [False, True], ids=["rewarded", "rewarded further down"])
def test_choices_of_one_request_are_alternatives_without_a_warning(below: bool) -> None:
    nodes = turns(("x", None, None), ("x.1", None, None), ("b", "x", 1.0), ("c", "x.1", 0.25), seconds=1.0)
    for node in nodes[:2]:
        node.state_hash, node.created_at = "x", 0.0
    if not below:
        del nodes[2:]
        nodes[0].reward, nodes[1].reward = 1.0, 0.25
    found = laid(nodes, chosen := options(Layout.CONCAT))
    assert (rewards(found), found.entry["reward_scope"], warned(found, chosen)) == ([1.0, 0.25], "path", "")


def test_of_answers_that_overlapped_those_without_a_reward_do_not_count() -> None:
    nodes = turns(("x1", None, None), ("x2", None, 1.0))
    found = laid(nodes, chosen := options(Layout.CONCAT))
    assert (rewards(found), found.entry["reward_scope"], warned(found, chosen)) == ([1.0, 1.0], "session", "")


def test_a_score_that_the_end_gave_comes_before_the_tree_and_after_a_scope() -> None:
    for nodes in (WALL, BEST_OF_4, SUCCESS):
        found = laid(nodes, chosen := options(Layout.CONCAT), score=7.0)
        assert set(rewards(found)) == {7.0} and warned(found, chosen) == ""
        assert (found.entry["reward_scope"], found.entry["score"]) == ("session", 7.0)
        by_path = laid(nodes, options(Layout.CONCAT, reward_scope=RewardScope.PATH), score=7.0)
        assert rewards(by_path) == rewards(laid(nodes, options(Layout.CONCAT, reward_scope=RewardScope.PATH)))
        assert (by_path.entry["reward_scope"], by_path.entry["episode_score"]) == ("path", 7.0)
    assert "episode_score" not in laid(WALL, options(Layout.CONCAT)).entry


def test_a_named_reward_that_the_export_asks_for_comes_before_the_given_score() -> None:
    nodes = turns(("a", None, 1.0), ("b", "a", 2.0))
    nodes[1].rewards = {"style": 0.5}
    assert rewards(laid(nodes, options(Layout.CONCAT, reward=MainReward("style")), score=7.0)) == [1.5]
    assert rewards(laid(nodes, options(Layout.CONCAT, reward=MainReward("tone")), score=7.0)) == [7.0]


def test_a_group_whose_sessions_are_scored_by_different_scopes_warns() -> None:
    chosen, groups = options(Layout.CONCAT, advantages=Baseline.GRPO), Groups()
    sessions = {"best": BEST_OF_4, "success": SUCCESS}
    for name, nodes in sessions.items():
        scored = scored_session(SessionRecord(name, group_id="g"), nodes, chosen)
        groups.add("g", scored.values(), [])
        groups.note_scope("g", scored.scores.scope, name)
    for name, nodes in sessions.items():
        told = warned(lay_out(SessionRecord(name, group_id="g"), nodes, chosen, groups), chosen)
        assert "path ('best')" in told and "session ('success')" in told and "'reward_scope'" in told


def test_the_score_of_alternatives_is_the_mean_of_their_paths_however_the_scope_became_path() -> None:
    asked = turns(("x1", None, 1.0), ("x2", None, 0.0), seconds=1.0)
    for nodes, how in ((BEST_OF_4, None), (asked, RewardScope.PATH)):
        assert laid(nodes, options(Layout.CONCAT, reward_scope=how)).entry["score"] == 0.5
