"""The rule of the word chain, which decides every reward of the training demo."""

from __future__ import annotations

import pytest

from tokengrove.demos.word_chain import verify


@pytest.mark.parametrize(
    ("opening", "words", "rewards"),
    [
        ("s", [], []),
        ("s", ["sea"], [0.5]),
        ("s", ["sea", "agent"], [0.5, 0.5]),
        ("s", ["sea", "tree"], [0.5, 0.0]),
        ("s", ["tree"], [0.0]),
        ("s", [""], [0.0]),
        ("s", ["s", "s"], [0.5, 0.0]),
        ("t", ["tat", "tr"], [0.5, 0.5]),
        ("t", ["tas\ufffd", "\ufffdr"], [0.5, 0.0]),
        ("t", ['tas"]', "so"], [0.5, 0.5]),
    ],
)
def test_each_word_must_be_new_and_begin_with_the_last_letter_of_the_word_before(
    opening: str, words: list[str], rewards: list[float]
) -> None:
    assert verify(opening, words) == rewards
