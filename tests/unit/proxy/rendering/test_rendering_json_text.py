"""The incremental JSON scanner accepts exactly what Python's parser accepts, and stops where the text breaks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.rendering.tool_calls.json_calls import loads
from proxy.rendering.tool_calls.json_text import MAX_DEPTH, JsonText

quick = settings(max_examples=300)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NOISE = st.lists(
    st.sampled_from([*'{}[]:,"\\ \n-+.eE019tfnu/', "true", "null", '"a"', "é", "\x01", "1e5", "\\u00e9", "'", "NaN"]),
    max_size=12,
).map("".join)


@quick
@given(value=VALUES, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_every_json_text_is_accepted_to_its_end(value: object, ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    reader = JsonText()
    # A top-level number ends with the character after it.
    assert reader.push(text + " ") >= len(text)
    assert reader.complete and not reader.broken


@quick
@given(text=NOISE, cuts=st.lists(st.integers(0, 20), max_size=4))
def test_noise_is_accepted_exactly_where_python_accepts_it(text: str, cuts: list[int]) -> None:
    whole = JsonText()
    taken = whole.push(text + " ")
    valid = loads(text) is not None or text.strip(" \n") == "null"
    assert (whole.complete and not (text + " ")[taken:].strip(" \n")) == valid
    assert chunked(text + " ", cuts) == (taken, whole.complete, whole.broken)


def chunked(text: str, cuts: list[int]) -> tuple[int, bool, bool]:
    reader, taken = JsonText(), 0
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(edges):
        taken += reader.push(text[start:end])
        if taken < end:
            break
    return taken, reader.complete, reader.broken


@quick
@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=3), size=st.integers(0, 200))
def test_every_start_of_an_object_can_still_become_one(value: object, size: int) -> None:
    text = json.dumps(value)[:size]
    reader = JsonText()
    assert reader.push(text) == len(text)
    assert not reader.broken


@pytest.mark.parametrize("text", ["{'", "{a", "{,", "[]", "{ ]"])
def test_an_object_that_begins_malformed_never_has_a_valid_start(text: str) -> None:
    reader = JsonText()
    reader.push(text[:1])
    assert text[0] == "[" or not reader.valid_start


def test_depth_is_bounded() -> None:
    reader = JsonText()
    assert reader.push("[" * 5000) == MAX_DEPTH
    assert reader.broken


@pytest.mark.parametrize("space", [" ", "\t", "\n", "\r"])
def test_any_white_space_may_follow_a_number(space: str) -> None:
    text, scanner = f'{{"a": 1{space}}}', JsonText()
    assert (scanner.push(text), scanner.complete) == (len(text), True)
