"""Advantages equal those computed with NumPy's mean and standard deviation over whole groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.advantages import Groups, RunningStatistics, group_of
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.main_reward import MainReward
from proxy.trajectory.scored_session import scored_session
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tokengrove.options.export import Baseline, Layout

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
