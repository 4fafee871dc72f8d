"""Advantages equal those computed with NumPy's mean and standard deviation over whole groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.advantages import Groups, RunningStatistics, group_of
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.main_reward import MainReward
from proxy.trajectory.scored_session import scored_session
from proxy.trajectory.scores import Compared
from proxy.types import Interaction, Lineage, SessionRecord
from tests.interactions import interaction
from tokengrove.options.export import Baseline, Layout, TurnCredit, Unrewarded
from tokengrove.options.session import Credit, RewardScope, SessionStatus
from tokengrove.reasons import Evidence, Segment


def turns_of(rewards: list[float | None], states: list[str | None] | None = None) -> list[Interaction]:
    """A conversation with these rewards of its turns."""
    found = []
    for at, reward in enumerate(rewards):
        parent = str(at - 1) if at else None
        found.append(interaction(str(at), parent=parent, prefix=2 * at, seq=at, reward=reward))
        found[-1].state_hash = states[at] if states else None
    return found


def turn_advantages(sessions: list[list[Interaction]], **more: Any) -> list[list[float]]:
    """Those of the turns of each session of one group."""
    options = LayoutOptions(**more)
    records = [SessionRecord(f"s{at}", group_id="g") for at in range(len(sessions))]
    groups = Groups()
    for record, turns in zip(records, sessions, strict=True):
        scored = scored_session(record, turns, options)
        groups.add(group_of(record.session_id, "g"), scored.values(), scored.steps(), scored.rewards())
    rows = [lay_out(record, turns, options, groups).paths for record, turns in zip(records, sessions, strict=True)]
    return [row.columns()["turn_advantages"].tolist() for (row,) in rows]


rewards_of_turns = st.lists(st.lists(st.none() | st.integers(-4, 4), min_size=1, max_size=6), min_size=2, max_size=5)


@given(rewards_of_turns)
def test_process_advantages_are_sums_of_later_normalised_rewards(drawn: list[list[int | None]]) -> None:
    """DeepSeekMath, section 4.1.3: each reward less the mean of all rewards of the group, over their standard
    deviation; the advantage of a step is the sum of those of this step and the later ones."""
    everything = [reward for session in drawn for reward in session if reward is not None]
    found = turn_advantages([turns_of(list(each)) for each in drawn], turn_advantages=TurnCredit.PROCESS, discount=1.0)
    for session, advantages in zip(drawn, found, strict=True):
        scaled = [0.0] * len(session)
        if len(everything) > 1:
            mean, std = np.mean(everything), np.std(everything, ddof=1)
            scaled = [0.0 if reward is None else (reward - mean) / (std + 1e-6) for reward in session]
        assert advantages == pytest.approx([sum(scaled[at:]) for at in range(len(scaled))], abs=1e-4)


@given(rewards_of_turns, st.sampled_from([0.0, 1.0, 0.5]), st.floats(0.5, 1.0), st.data())
def test_gigpo_adds_the_advantage_of_the_episode_and_of_the_state(
    drawn: list[list[int | None]], weight: float, discount: float, data: st.DataObject
) -> None:
    """GiGPO, equations 3, 5 to 8: episodes compared by their rewards, steps of one state by discounted returns."""
    states = [[data.draw(st.sampled_from(["x", "y"])) for _ in session] for session in drawn]
    sessions = [turns_of(list(rewards), list(own)) for rewards, own in zip(drawn, states, strict=True)]
    how = {"turn_advantages": TurnCredit.GIGPO, "step_weight": weight, "discount": discount}
    found = turn_advantages(sessions, unrewarded=Unrewarded.ZERO, **how)

    def normal(value: float, others: list[float]) -> float:
        return 0.0 if len(others) < 2 else (value - np.mean(others)) / (np.std(others, ddof=1) + 1e-6)

    totals = [float(sum(reward or 0 for reward in session)) for session in drawn]
    returns = [
        [sum(discount**k * (reward or 0) for k, reward in enumerate(session[at:])) for at in range(len(session))]
        for session in drawn
    ]
    by_state: dict[str, list[float]] = {}
    for own, values in zip(states, returns, strict=True):
        for state, value in zip(own, values, strict=True):
            by_state.setdefault(state, []).append(value)
    for number, advantages in enumerate(found):
        pairs = zip(states[number], returns[number], strict=True)
        steps = [normal(value, by_state[state]) for state, value in pairs]
        episode = normal(totals[number], totals)
        assert advantages == pytest.approx([episode + weight * step for step in steps], rel=1e-3, abs=1e-3)


def test_turn_advantages_go_over_forks_and_lineages() -> None:
    """A fork gets the mean of its branches, a compacted conversation what comes after it."""
    forked = turns_of([None, 4.0])
    forked.append(interaction("2", parent="0", prefix=2, seq=2, reward=0.0))
    other = turns_of([2.0])
    options = LayoutOptions(turn_advantages=TurnCredit.PROCESS, layout=Layout.TREE)
    groups = Groups()
    for record, turns in ((SessionRecord("a", group_id="g"), forked), (SessionRecord("b", group_id="g"), other)):
        scored = scored_session(record, turns, options)
        groups.add(group_of("a", "g"), scored.values(), scored.steps(), scored.rewards())
    (row,) = lay_out(SessionRecord("a", group_id="g"), forked, options, groups).rows
    assert row.columns()["turn_advantages"].tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-4)
    compacted = turns_of([None, None])
    compacted.append(interaction("2", seq=2, reward=4.0))
    compacted[-1].lineage = Lineage(("1",), Segment.COMPACTION, Evidence.SUMMARY)
    how = LayoutOptions(turn_advantages=TurnCredit.PROCESS, credit=Credit.LINEAGE)
    scored = scored_session(SessionRecord("c", group_id="h"), compacted, how)
    groups.add(group_of("c", "h"), scored.values(), scored.steps(), scored.rewards())
    groups.add(group_of("c", "h"), [], [], [Compared(0.0, None)])
    rows = lay_out(SessionRecord("c", group_id="h"), compacted, how, groups).paths
    assert [value for row in rows for value in row.columns()["turn_advantages"].tolist()] == pytest.approx(
        [0.70711] * 3, abs=1e-4
    )


values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


def spread_of(numbers: list[float]) -> RunningStatistics:
    spread = RunningStatistics()
    for number in numbers:
        spread.add(number)
    return spread


@given(values)
def test_grpo_is_the_distance_from_the_mean_in_standard_deviations(numbers: list[float]) -> None:
    spread = spread_of(numbers)
    expected = (np.array(numbers) - np.mean(numbers)) / (np.std(numbers, ddof=1) + 1e-6)
    found = [spread.advantage(number, Baseline.GRPO) for number in numbers]
    assert found == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-3)


@given(values)
def test_leave_one_out_is_the_distance_from_the_mean_of_the_others(numbers: list[float]) -> None:
    spread = spread_of(numbers)
    for at, number in enumerate(numbers):
        others = np.mean(numbers[:at] + numbers[at + 1 :])
        assert spread.advantage(number, Baseline.LEAVE_ONE_OUT) == pytest.approx(number - others, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("baseline", list(Baseline))
def test_a_value_that_is_alone_or_equal_to_all_others_has_advantage_0(baseline: Baseline) -> None:
    assert RunningStatistics().advantage(1.0, baseline) == 0
    assert spread_of([3.0]).advantage(3.0, baseline) == 0
    assert spread_of([0.1] * 7).advantage(0.1, baseline) == pytest.approx(0, abs=1e-9)


def session(name: str, group: str | None, reward: float, state: str | None) -> tuple[SessionRecord, list[Interaction]]:
    """Two turns: the first has the `state`, the second the reward."""
    nodes = [interaction("a", seq=0), interaction("b", parent="a", prefix=2, seq=1, reward=reward)]
    nodes[0].state_hash = state
    return SessionRecord(name, group_id=group, discount=0.5), nodes


SESSIONS = [
    session("s1", "g", 1.0, "x"),
    session("s2", "g", 0.0, "x"),
    session("s3", "g", 4.0, "y"),
    session("s4", None, 9.0, "x"),
]


def grouped(sessions: list[tuple[SessionRecord, list[Interaction]]], options: LayoutOptions) -> Groups:
    groups = Groups()
    for record, nodes in sessions:
        scored = scored_session(record, nodes, options)
        groups.add(group_of(record.session_id, record.group_id), scored.values(), scored.steps())
    return groups


def exported(baseline: Baseline) -> list[list[list[float]]]:
    options = LayoutOptions(layout=Layout.CONCAT, advantages=baseline, step_advantages=baseline)
    groups = grouped(SESSIONS, options)
    rows = [lay_out(record, nodes, options, groups).rows[0].columns() for record, nodes in SESSIONS]
    return [[row["advantages"].tolist(), row["step_advantages"].tolist()] for row in rows]


def test_sessions_are_compared_in_their_group_and_steps_in_their_state() -> None:
    first, second, third, alone = exported(Baseline.LEAVE_ONE_OUT)
    # Scores 1, 0, 4; the returns of the first turns are half of them, and only s1 and s2 saw state x.
    assert first == [[1.0 - 2.0], [0.5, 0.0]]
    assert second == [[0.0 - 2.5], [-0.5, 0.0]]
    assert third == [[4.0 - 0.5], [0.0, 0.0]]
    assert alone == [[0.0], [0.0, 0.0]]
    scores = np.array([1.0, 0.0, 4.0])
    expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    assert [each[0][0] for each in exported(Baseline.GRPO)[:3]] == pytest.approx(expected.tolist())


def test_a_session_without_a_complete_turn_joins_no_group() -> None:
    assert grouped([(SessionRecord("s", group_id="g"), [])], LayoutOptions()).scores == {}


def test_groups_compare_the_main_reward() -> None:
    record, nodes = session("s1", "g", 1.0, None)
    nodes[1].rewards = {"style": 5.0}
    record.metrics = {"checks": 0.5}
    for name, mean in (("style", 5.0), ("checks", 0.5)):
        groups = grouped([(record, nodes)], LayoutOptions(reward=MainReward(name)))
        assert (groups.scores["g", None].mean, groups.members("g")) == (mean, 1)


def test_grpo_adds_one_millionth_to_the_standard_deviation() -> None:
    deviation = 1e-6 / np.sqrt(2)
    assert spread_of([0.0, 1e-6]).advantage(1e-6, Baseline.GRPO) == pytest.approx(5e-7 / (deviation + 1e-6))


@pytest.mark.parametrize(("how", "factor"), [(TurnCredit.PROCESS, 1.0), (TurnCredit.GIGPO, 2.0)])
def test_turn_advantages_compare_by_the_formula_of_advantages(how: TurnCredit, factor: float) -> None:
    sessions = [turns_of([reward], ["x"]) for reward in (1.0, 0.0, 5.0)]
    found = turn_advantages(sessions, turn_advantages=how, advantages=Baseline.LEAVE_ONE_OUT)
    assert found == [[factor * value] for value in (-1.5, -3.0, 4.5)]


def test_process_advantages_compare_the_rewards_of_each_agent_in_sessions_that_count() -> None:
    options = LayoutOptions(
        turn_advantages=TurnCredit.PROCESS,
        advantages=Baseline.LEAVE_ONE_OUT,
        reward_scope=RewardScope.AGENT,
        unrewarded=Unrewarded.SKIP,
        credit=Credit.TREE,
        discount=0.0,
    )
    groups, records, sessions = Groups(), [], []
    for at, (status, rewards) in enumerate(
        ((SessionStatus.ENDED, [1.0, 10.0]), (SessionStatus.ENDED, [3.0, 40.0]), (SessionStatus.ACTIVE, [100.0, 100.0]))
    ):
        record, turns = SessionRecord(f"s{at}", group_id="g", status=status), turns_of(rewards)
        turns[0].agent, turns[1].agent = "one", "two"
        scored = scored_session(record, turns, options)
        groups.add("g", scored.values(), scored.steps(), scored.rewards())
        records.append(record)
        sessions.append(turns)
    found = []
    for record, turns in zip(records[:2], sessions[:2], strict=True):
        (row,) = lay_out(record, turns, options, groups).paths
        found.append(row.columns()["turn_advantages"].tolist())
    assert found == [[-2.0, -30.0], [2.0, 30.0]]
