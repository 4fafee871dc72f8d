"""What is kept of a long tool response, and how the settings say it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.verl.truncation import Truncation


@pytest.mark.parametrize(
    ("side", "kept"),
    [("left", "abcd...(truncated)"), ("right", "(truncated)...ghij"), ("middle", "ab...(truncated)...ij")],
)
def test_a_side_is_read_as_the_documentation_prints_it(side: str, kept: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cut = Truncation.of({"max_tool_response_length": 4, "tool_response_truncate_side": side}).cut("abcdefghij")
    assert cut == kept
    assert len(told) == (side != "middle")
    for each in told:
        plainly = "head" if side == "left" else "tail"
        assert f"keeps the {plainly} of a tool response, as verl's documentation prints it" in str(each.message)
        assert f"newer releases of verl keep the other part. Write keep={plainly}" in str(each.message)


@pytest.mark.parametrize(
    ("keep", "kept"), [("head", "a...(truncated)"), ("tail", "(truncated)...j"), ("ends", "...(truncated)...")]
)
def test_one_character_may_be_kept(keep: str, kept: str) -> None:
    assert Truncation.of({"max_tool_response_length": 1, "keep": keep}).cut("abcdefghij") == kept


def test_a_text_that_fits_stays() -> None:
    assert Truncation.of({"max_tool_response_length": 3}).cut("abc") == "abc"
    assert Truncation.of({"max_tool_response_length": None}).cut("abc" * 1000) == "abc" * 1000


def test_a_side_and_what_is_kept_may_be_given_if_they_agree() -> None:
    assert Truncation.of({"keep": "head", "tool_response_truncate_side": "left"}).keep == "head"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"keep": "tail", "tool_response_truncate_side": "left"}, "'left' keeps the head: give 'keep' alone"),
        ({"keep": "middle"}, "'keep' must be one of head, tail, ends, not 'middle'"),
        ({"max_tool_response_length": 0}, "positive number of characters, not 0"),
        ({"max_tool_response_length": "9"}, "positive number of characters, not '9'"),
    ],
)
def test_settings_that_contradict_or_are_unknown_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Truncation.of(settings)


def test_a_side_that_is_unknown_keeps_both_ends_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'lft' keeps both ends"):
        assert Truncation.of({"tool_response_truncate_side": "lft", "max_tool_response_length": 2}).keep == "ends"
