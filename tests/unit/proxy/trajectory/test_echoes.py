"""Which echoes of an answer are the answer: everything that only moves, splits or drops our own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.prompt_ids import PromptIds
from proxy.trajectory.arguments import Fit, compare_arguments
from proxy.trajectory.cache import InteractionCache, Match
from proxy.trajectory.echoes import Restored, restore
from proxy.trajectory.matching import identify
from proxy.types import Message, Role, ToolCall
from tests.interactions import interaction
from tokengrove.reasons import Echo

ASK = Message(Role.USER, "q")
CALLS = (ToolCall("1", "f", '{"a": 1}'), ToolCall("2", "f", "{}"))
WORDS = st.text(st.sampled_from("ab \n<>é"), max_size=12).map(str.strip)
TAGS = st.sampled_from(["", "\n", "\n\n", "<think>", "</think>\n", "</thinking>", " [/THINK]\n"])


def restored(answer: Message, *echo: Message) -> Restored | None:
    cache = InteractionCache()
    first = interaction("a", seq=0)
    first.new_messages, first.output = (ASK,), answer
    cache.add(cache.node_for(first, identify((ASK,), (), {}), Match(None, 0), PromptIds()))
    messages = (ASK, *echo)
    return restore(cache, messages, identify(messages, (), {}), ())


def said(text: str, calls: tuple[ToolCall, ...] = ()) -> Message:
    return Message(Role.ASSISTANT, text, calls)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """The text cut at some of its characters."""
    at = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


@given(WORDS, WORDS, TAGS, st.lists(st.integers(0, 30), max_size=3), st.booleans(), st.booleans())
def test_our_words_are_ours_wherever_they_are_cut(
    text: str, reasoning: str, seam: str, cuts: list[int], swapped: bool, both: bool
) -> None:
    answer = Message(Role.ASSISTANT, text, CALLS, reasoning=reasoning or None)
    parts = pieces(text, cuts)
    if both:
        first, last = (parts, pieces(reasoning, cuts)) if swapped else (pieces(reasoning, cuts), parts)
        parts = [*first[:-1], first[-1] + seam + last[0], *last[1:]]
    found = restored(answer, *map(said, parts), said("", CALLS))
    assert found is not None
    assert found.messages == (ASK, answer)
    assert found.identity == identify(found.messages, (), {})
    assert Echo.SPLIT in found.echo


@given(WORDS, WORDS, st.text(min_size=1, max_size=3).filter(lambda text: text.strip(" \n\t")), st.integers(0, 30))
def test_a_word_too_many_is_the_clients_own(text: str, reasoning: str, more: str, at: int) -> None:
    answer = Message(Role.ASSISTANT, text, CALLS, reasoning=reasoning or None)
    where = at % (len(text) + 1)
    changed = text[:where] + f"x{more}x" + text[where:]
    assert restored(answer, said(changed, CALLS)) is None


@given(WORDS.filter(bool), st.integers(0, 30))
def test_a_character_missing_is_the_clients_own(text: str, at: int) -> None:
    where = at % len(text)
    changed = (text[:where] + text[where + 1 :]).strip()
    found = restored(said(text, CALLS), said(changed, CALLS))
    assert found is None or changed == "" or set(text[where]) <= {" ", "\n"}


def test_a_tool_result_for_another_call_between_the_calls_is_no_echo() -> None:
    between = Message(Role.TOOL, "r", tool_call_id="other")
    assert restored(said("so", CALLS), said("", CALLS[:1]), between, said("", CALLS[1:])) is None
    assert restored(said("so", CALLS), said("", CALLS[:1]), ASK, said("", CALLS[1:])) is None


def test_many_messages_without_calls_are_looked_at_once() -> None:
    echo = [said("x")] * 20_000
    assert restored(said("so", CALLS), *echo, said("", CALLS)) is None


NESTED = {
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "n": {}}, "required": ["n"]}},
    "properties": {
        "node": {"allOf": [{"$ref": "#/$defs/Node"}]},
        "nodes": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
        "one": {"oneOf": [{"type": "object", "properties": {"x": {}}}, {"type": "string"}]},
        "must": {},
    },
    "required": ["must"],
}


@pytest.mark.parametrize(
    ("ours", "theirs", "fit"),
    [
        ({"must": 1}, {"must": 1, "node": None, "nodes": None}, Fit.NULLS_ADDED),
        ({"node": {"n": {}}}, {"node": {"n": {}, "next": None}}, Fit.NULLS_ADDED),
        ({"node": {"n": 1, "next": {"n": 2}}}, {"node": {"n": 1, "next": {"next": None, "n": 2}}}, Fit.NULLS_ADDED),
        ({"nodes": [{"n": 1}, {"n": 2}]}, {"nodes": [{"n": 1}, {"n": 2, "next": None}]}, Fit.NULLS_ADDED),
        ({"one": {}}, {"one": {"x": None}}, Fit.NULLS_ADDED),
        ({"nodes": [{"n": 1}]}, {"nodes": [{"n": 1}, None]}, Fit.DIFFERENT),
        ({"node": {"next": {"n": 1}}}, {"node": {"next": {"n": 1}, "n": None}}, Fit.DIFFERENT),
        ({}, {"must": None}, Fit.DIFFERENT),
        ({}, {"else": None}, Fit.DIFFERENT),
        ({"node": None}, {}, Fit.DIFFERENT),
        ({"must": 1}, {"must": True, "node": None}, Fit.DIFFERENT),
        ({"must": 0}, {"must": None}, Fit.DIFFERENT),
        ({"must": 1.0}, {"node": None, "must": 1}, Fit.NULLS_ADDED),
        ([1], [1, None], Fit.DIFFERENT),
    ],
)
def test_added_nulls_count_where_the_schema_makes_their_keys_optional(ours: Any, theirs: Any, fit: Fit) -> None:
    assert compare_arguments(json.dumps(ours), json.dumps(theirs), NESTED) is fit


def test_a_required_that_is_no_list_requires_nothing() -> None:
    schema = {"properties": {"b": {}}, "required": True}
    assert compare_arguments('{"a": 1}', '{"a": 1, "b": null}', schema) is Fit.NULLS_ADDED


@pytest.mark.parametrize("schema", [{}, {"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"properties": []}, {"items": 1}])
def test_schemas_that_say_nothing_make_no_key_optional(schema: dict[str, Any]) -> None:
    assert compare_arguments('{"a": 1}', '{"a": 1, "b": null}', schema) is Fit.DIFFERENT


def test_a_schema_that_refers_to_itself_many_times_is_read_once() -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/N"}] * 50, "properties": {"n": {"$ref": "#/$defs/N"}, "x": {}}}
    schema = {"$defs": {"N": itself}, "$ref": "#/$defs/N"}
    ours, theirs = ('{"n": ' * 50 + end + "}" * 50 for end in ("{}", '{"x": null}'))
    assert compare_arguments(ours, theirs, schema) is Fit.NULLS_ADDED


@pytest.mark.parametrize("text", ["not json", "[" * 5000, ""])
def test_text_that_is_no_object_is_compared_as_text(text: str) -> None:
    assert compare_arguments(text, text, {}) is Fit.EQUAL
    assert compare_arguments(text, '{"b": null}', {}) is Fit.DIFFERENT
