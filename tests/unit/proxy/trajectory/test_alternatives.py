"""Alternatives and steps in random episodes, against the rule as it is written: every pair of answers is looked at."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.scores import rewarded_answers
from proxy.trajectory.tree import build_tree
from proxy.types import Interaction
from tests.interactions import interaction
from tokengrove.reasons import Reason

TIMES = st.integers(0, 12)


@st.composite
def episodes(draw: st.DrawFn) -> list[Interaction]:
    """Turns in order of completion, each below an earlier one or none; every third request has two choices."""
    spans = sorted(draw(st.lists(st.tuples(TIMES, st.integers(1, 6)), min_size=1, max_size=7)), key=sum)
    made: list[Interaction] = []
    for number, (begun, seconds) in enumerate(spans):
        parent = draw(st.sampled_from([None, *(node.id for node in made if node.completed_at <= begun)]))
        state, choices = draw(st.sampled_from("pq")), draw(st.sampled_from((1, 1, 2)))
        for index in range(choices):
            reward = draw(st.sampled_from((None, 0.0, 1.0)))
            name = f"r{number}" + (f".{index}" if index else "")
            node = interaction(name, parent=parent, seq=len(made), reward=reward)
            node.state_hash, node.created_at, node.completed_at = state, float(begun), float(begun + seconds)
            asked = any((other.parent_id, other.state_hash) == (parent, state) for other in made)
            node.reason = Reason.RESAMPLED if asked else Reason.FIRST
            made.append(node)
    return made


def is_rewarded(node: Interaction, nodes: list[Interaction]) -> bool:
    below = [other for other in nodes if other.parent_id == node.id]
    return node.reward is not None or any(is_rewarded(other, nodes) for other in below)


@given(episodes())
def test_alternatives_are_choices_or_rewarded_answers_that_overlapped(nodes: list[Interaction]) -> None:
    rewarded = [node for node in nodes if is_rewarded(node, nodes)]
    pairs = [
        (one, other)
        for one, other in combinations(rewarded, 2)
        if (one.parent_id, one.state_hash) == (other.parent_id, other.state_hash)
    ]
    same = [(one, other) for one, other in pairs if one.id.split(".")[0] == other.id.split(".")[0]]
    others = [pair for pair in pairs if pair not in same]
    overlapping = [
        (one, other) for one, other in others if max(one.created_at, other.created_at) < min(ends(one), ends(other))
    ]
    found = rewarded_answers(build_tree(nodes), {node.id: node.reward for node in nodes})
    assert (found.choices is not None, found.overlapping is not None) == (bool(same), bool(overlapping))
    assert found.are_alternatives == bool(same or overlapping)
    if others and not overlapping:
        assert found.successive is not None
    if not others:
        assert found.successive is None


def ends(node: Interaction) -> float:
    assert node.completed_at is not None
    return node.completed_at
