"""A sample as runs of tokens: they cover it, and say what a trainer would see in its arrays."""

from __future__ import annotations

import numpy as np

from proxy.trajectory.outline import runs


def spans(*of_turns: tuple[int, int] | None) -> list[dict[str, object]]:
    return [{"span": None if span is None else list(span)} for span in of_turns]


def columns(mask: list[int], **more: list[int]) -> dict[str, np.ndarray]:
    found = {"input_ids": np.zeros(len(mask)), "loss_mask": np.array(mask), "attention_mask": np.ones(len(mask))}
    return found | {name: np.array(values) for name, values in more.items()}


def test_a_path_is_prompt_then_outputs_with_context_between_them() -> None:
    assert runs(spans((2, 4), (5, 7)), columns([0, 0, 1, 1, 0, 1, 0, 0])) == [
        [0, 2, "prompt", 0],
        [2, 4, "trained", 0],
        [4, 5, "context", 1],
        [5, 6, "trained", 1],
        [6, 7, "sampled", 1],
        [7, 8, "context", None],
    ]


def test_a_turn_that_is_not_there_as_sampled_has_no_run() -> None:
    assert runs(spans(None, (3, 4)), columns([0, 0, 0, 1])) == [[0, 3, "prompt", 1], [3, 4, "trained", 1]]
    assert runs(spans(None), columns([0, 0])) == [[0, 2, "prompt", None]]
    assert runs([], columns([])) == []


def test_two_outputs_side_by_side_are_two_runs() -> None:
    assert runs(spans((0, 1), (1, 2)), columns([1, 1])) == [[0, 1, "trained", 0], [1, 2, "trained", 1]]


def test_padding_is_told_from_the_prompt() -> None:
    padded = columns([0, 0, 0, 1, 0], attention_mask=[0, 1, 1, 1, 0], prompts=[0, 0, 0])
    assert runs(spans((3, 4)), padded) == [
        [0, 1, "padding", None],
        [1, 3, "prompt", 0],
        [3, 4, "trained", 0],
        [4, 5, "padding", None],
    ]


def test_each_root_of_a_tree_has_a_prompt() -> None:
    """Two roots, the first with a child: [0, 1] -> 2, then below it [3] -> 4; and [5] -> 6."""
    tree = columns([0, 0, 1, 0, 1, 0, 0], node_offsets=[0, 3, 5, 7], node_parents=[-1, 0, -1])
    assert runs(spans((2, 3), (4, 5), (6, 7)), tree) == [
        [0, 2, "prompt", 0],
        [2, 3, "trained", 0],
        [3, 4, "context", 1],
        [4, 5, "trained", 1],
        [5, 6, "prompt", 2],
        [6, 7, "sampled", 2],
    ]
