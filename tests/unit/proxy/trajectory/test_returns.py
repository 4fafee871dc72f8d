"""Returns by both credit rules, on trees worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proxy.trajectory.returns import compute_returns
from proxy.types import Interaction
from tests import golden
from tests.interactions import interaction
from tokengrove.options.session import Credit
from tokengrove.reasons import Status

Tree = Sequence[tuple[str, str | None, float | None]]


def nodes(tree: Tree) -> list[Interaction]:
    return [interaction(name, parent=parent, reward=reward, seq=seq) for seq, (name, parent, reward) in enumerate(tree)]


def chain(*rewards: float | None) -> Tree:
    return [(str(at), str(at - 1) if at else None, reward) for at, reward in enumerate(rewards)]


@pytest.mark.parametrize("case", golden.load("returns"))
def test_returns_equal_the_ones_computed_by_hand(case: dict[str, Any]) -> None:
    returns = compute_returns(nodes(case["tree"]), case["discount"], Credit(case["credit"]))
    assert [returns[name] for name, _, _ in case["tree"]] == pytest.approx(case["returns"])


def test_a_failed_call_is_no_step() -> None:
    between = interaction("x", parent="0", seq=1)
    between.status = Status.FAILED
    tree = [interaction("0", seq=0), between, interaction("1", parent="0", reward=1.0, seq=2)]
    assert compute_returns(tree, 0.9, Credit.TREE) == pytest.approx({"0": 0.9, "1": 1.0})


def test_returns_for_several_discounts_leave_raw_rewards_unchanged() -> None:
    tree = nodes(chain(1, 2))
    assert compute_returns(tree, 1.0, Credit.TREE)["0"] == pytest.approx(3)
    assert compute_returns(tree, 0.5, Credit.TREE)["0"] == pytest.approx(2)
    assert [node.reward for node in tree] == [1, 2]
