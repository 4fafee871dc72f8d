"""The tokens of a path."""

from __future__ import annotations

from proxy.trajectory.tree import Branch, token_ids
from proxy.types import ids_of
from tests.interactions import interaction


def path(*, aligned: bool) -> Branch:
    """A turn with prompt 1 2 and output 3, and the next one, which adds 4 5 and samples 6 7."""
    first = interaction("a", output=ids_of([3]), seq=0)
    first.prompt_suffix = ids_of([1, 2])
    second = interaction("b", output=ids_of([6, 7]), seq=1)
    second.prompt_suffix, second.aligned = ids_of([4, 5]), aligned
    return Branch(second, Branch(first, None, 0), 1)


def test_the_tokens_of_a_path_begin_at_its_last_node_that_is_not_aligned() -> None:
    assert token_ids(path(aligned=True)).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert token_ids(path(aligned=False)).tolist() == [4, 5, 6, 7]
