"""Ids that grow in arrays are the same ids, the same JSON and the same largest id as in one array."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.prompt_ids import PromptIds
from proxy.types import Ids, ids_of

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(ids_of)
GROWTH = st.lists(st.tuples(st.integers(0, 99), st.lists(IDS, max_size=3), st.booleans()), max_size=12)


def check(found: PromptIds, ids: list[int], count: int) -> None:
    assert len(found) == len(ids)
    assert found.joined.tolist() == ids
    assert orjson.loads(b"".join(found.json())) == ids
    assert found.largest == max(ids, default=-1)
    assert found.tail(count).tolist() == ids[-count:]


@given(GROWTH, st.integers(1, 12))
def test_a_tree_of_ids_is_right_in_every_node_whatever_was_asked_of_others_before(
    growth: list[tuple[int, list[Ids], bool]], count: int
) -> None:
    """Each step extends a node that exists; some are asked at once, all at the end."""
    tree: list[tuple[PromptIds, list[int]]] = [(PromptIds(), [])]
    for number, arrays, asked in growth:
        parent, before = tree[number % len(tree)]
        node, ids = parent.extended(*arrays), before + [token for array in arrays for token in array]
        assert node.begins_with(parent)
        tree.append((node, ids))
        if asked:
            check(node, ids, count)
    for node, ids in tree:
        check(node, ids, count)
        assert all(node.joined[: len(other)] == other.joined for other, _ in tree if node.begins_with(other))


def test_only_the_json_of_new_ids_is_made() -> None:
    start = PromptIds(ids_of([5, 70]))
    first = start.extended(ids_of([1]))
    assert b"".join(first.json()) == b"[5,70,1]"
    second, sibling = first.extended(ids_of([2, 3])), start.extended(ids_of([4]))
    assert (b"".join(second.json()), b"".join(sibling.json())) == (b"[5,70,1,2,3]", b"[5,70,4]")
    assert first.json()[1] is second.json()[1] is sibling.json()[1]


def test_ids_begin_with_others_id_by_id() -> None:
    start = PromptIds(ids_of([1, 2]))
    assert start.extended(ids_of([3])).begins_with(PromptIds(ids_of([1, 2])))
    assert not start.extended(ids_of([3])).begins_with(PromptIds(ids_of([1, 3])))
    assert not start.begins_with(start.extended(ids_of([3])))


@pytest.mark.parametrize("at", [0, 499, 500, 1200])
def test_a_negative_id_counts_as_larger_than_all_others(at: int) -> None:
    ids = ids_of([7] * 1201)
    assert PromptIds(ids).largest == 7
    ids[at] = -1
    assert PromptIds(ids).largest == 2**32 - 1
