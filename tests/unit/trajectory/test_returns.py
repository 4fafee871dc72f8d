"""Returns by both credit rules, on trees worked out by hand."""

from __future__ import annotations

import pytest

from proxy.trajectory.returns import compute_returns
from proxy.types import Credit, Interaction, Status
from tests.interactions import interaction

Tree = list[tuple[str, str | None, float | None]]


def nodes(tree: Tree) -> list[Interaction]:
    return [interaction(name, parent=parent, reward=reward, seq=seq) for seq, (name, parent, reward) in enumerate(tree)]


def chain(*rewards: float | None) -> Tree:
    return [(str(at), str(at - 1) if at else None, reward) for at, reward in enumerate(rewards)]


FORK: Tree = [("root", None, None), ("a", "root", 1.0), ("b", "root", 0.0)]
DEEP: Tree = [
    ("root", None, None),
    ("a", "root", None),
    ("b", "root", None),
    ("a1", "a", 2.0),
    ("a2", "a", 1.5),
    ("b1", "b", 3.0),
]


@pytest.mark.parametrize(
    ("tree", "discount", "expected"),
    [
        (chain(None, None, 10), 0.9, [8.1, 9, 10]),
        (chain(None, 1.5, 2.5), 0.85, [3.08125, 3.625, 2.5]),
        (chain(3, 2), 0.9, [4.8, 2]),
        (chain(1, 2, 1.5), 0.9, [4.015, 3.35, 1.5]),
        (chain(None, None, 1), 0.9, [0.81, 0.9, 1.0]),
        (FORK, 0.9, [0.45, 1, 0]),
        (DEEP, 1.0, [2.375, 1.75, 3, 2, 1.5, 3]),
        ([("A", None, 0.0), ("B", None, 1.0)], 0.9, [0, 1]),
        (chain(None, None, None), 0.9, [0, 0, 0]),
    ],
)
def test_tree_returns_equal_the_ones_computed_by_hand(tree: Tree, discount: float, expected: list[float]) -> None:
    returns = compute_returns(nodes(tree), discount, Credit.TREE)
    assert [returns[name] for name, _, _ in tree] == pytest.approx(expected)


def test_linear_credit_passes_from_root_to_root() -> None:
    returns = compute_returns(nodes([("A", None, 0.0), ("B", None, 1.0)]), 0.9, Credit.LINEAR)
    assert returns == pytest.approx({"A": 0.9, "B": 1.0})


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
