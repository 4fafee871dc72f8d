"""The identity of conversations: which messages are equal and which are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.matching import canonical_arguments, identify, request_hash
from proxy.types import TOKENS, Api, ImagePart, Message, Role, SamplingParams, Tool, ToolCall, TurnRequest

ASK = Message(Role.USER, "q")
CALLS = Message(Role.ASSISTANT, tool_calls=(ToolCall("1", "f", '{"a": 1}'), ToolCall("2", "f", '{"a": 2}')))

RENAMED = tuple(call._replace(id=f"x{call.id}") for call in CALLS.tool_calls)


def end(*messages: Message, tools: tuple[Tool, ...] = (), **options: str) -> int:
    return identify(messages, tools, options).end.key


def results(first: str, second: str) -> tuple[Message, Message]:
    return Message(Role.TOOL, "one", tool_call_id=first), Message(Role.TOOL, "two", tool_call_id=second)


IMAGE = ImagePart("a" * 64, 1, 64, 48)


@pytest.mark.parametrize("role", [Role.USER, Role.TOOL])
@pytest.mark.parametrize(
    "other",
    [
        (),
        (IMAGE, IMAGE),
        *((IMAGE._replace(**{k: v}),) for k, v in [("digest", "b" * 64), ("at", 0), ("detail", "low")]),
    ],
)
def test_an_image_counts_with_its_bytes_its_place_and_its_detail(role: Role, other: tuple[ImagePart, ...]) -> None:
    message = Message(role, "q", images=(IMAGE,))
    assert end(message) == end(message._replace(images=(ImagePart(*IMAGE),)))
    assert end(message) != end(message._replace(images=other))
    assert end(message, ASK) != end(message._replace(images=other), ASK)


def test_equal_token_ids_with_other_images_are_other_messages() -> None:
    message = Message(Role.USER, "q", name=f"{TOKENS}0123456789abcdef", images=(IMAGE,))
    for images in ((), (IMAGE._replace(digest="b" * 64),)):
        assert end(message) != end(message._replace(images=images))


def test_reasoning_and_names_do_not_count() -> None:
    answer = Message(Role.ASSISTANT, "a")
    assert end(ASK, answer) == end(ASK, answer._replace(reasoning="because", name="me"))


def test_call_ids_count_up_to_consistent_renaming() -> None:
    renamed = CALLS._replace(tool_calls=RENAMED)
    assert end(ASK, CALLS, *results("1", "2")) == end(ASK, renamed, *results("x1", "x2"))
    assert end(ASK, CALLS, *results("1", "2")) != end(ASK, CALLS, *results("2", "1"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
        ('{"a": 1.0}', '{"a":1}'),
        ("", "{}"),
        ('{"n": {"y": [1, {"b": 1, "a": 2}]}}', '{"n":{"y":[1,{"a":2,"b":1}]}}'),
        ('{"a": 123456789012345678901234567890}', '{"a":123456789012345678901234567890}'),
        ('{"b": NaN, "a": [Infinity, -Infinity, null]}', '{"a":[Infinity,-Infinity,null],"b":NaN}'),
        ('{"a": {"b": 1}, "b": "cut', '{"b":"cut","a":{"b":1}}'),
    ],
)
def test_arguments_are_compared_as_json(one: str, other: str) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ("not json", "not  json"),
        ('{"a":null}', "{}"),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":1,"a":2}', '{"a":1}'),
        ('{"n":[{"a":2,"a":2}]}', '{"n":[{"a":2}]}'),
        (r'{"a":"\ud800","b":1,"b":2}', r'{"a":"\ud800","b":2}'),
        ('{"a":1,"a":2,"b":"cut', '{"a":2,"b":"cut"}'),
    ],
)
def test_different_arguments_make_different_messages(one: str, other: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)


def test_numbers_that_are_not_finite_are_values_of_their_own() -> None:
    values = ("NaN", "Infinity", "-Infinity", "null", '"NaN"', "0")
    assert len({canonical_arguments(f'{{"a": [{value}]}}') for value in values}) == len(values)


def test_tools_system_and_options_belong_to_the_root() -> None:
    tool = Tool("f", "d", {"type": "object"})
    keys = {
        end(ASK),
        end(ASK, tools=(tool,)),
        end(ASK, tools=(replace(tool, description="e"),)),
        end(ASK, effort="low"),
        end(Message(Role.SYSTEM, "s"), ASK),
        end(ASK, Message(Role.SYSTEM, "s")),
    }
    assert len(keys) == 6


@given(st.lists(st.tuples(st.sampled_from(Role), st.text(max_size=5)), max_size=6), st.integers(0, 5))
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(parts: list[tuple[Role, str]], length: int) -> None:
    messages = [ASK, *(Message(role, text) for role, text in parts)]
    whole, part = identify(messages, (), {}), identify(messages[: length + 1], (), {})
    assert whole.states[: len(part.states)] == part.states


def retry_key(request: TurnRequest) -> str:
    return request_hash(request, request.sampling, identify(request.messages, (), {}))


def test_the_retry_key_depends_on_sampling_but_not_on_streaming() -> None:
    request = TurnRequest(Api.CHAT, "m", (ASK,))
    assert retry_key(request) == retry_key(replace(request, stream=True))
    assert retry_key(request) != retry_key(replace(request, sampling=SamplingParams(temperature=0.5)))


@pytest.mark.parametrize("changed", [{"reasoning": "because"}, {"origin": "chatcmpl-1"}, {"tool_calls": RENAMED}])
def test_the_retry_key_depends_on_what_an_answer_echoes(changed: dict[str, Any]) -> None:
    answers = CALLS, CALLS._replace(**changed)
    first, second = (TurnRequest(Api.CHAT, "m", (ASK, answer, ASK)) for answer in answers)
    assert identify(first.messages, (), {}).end.key == identify(second.messages, (), {}).end.key
    assert retry_key(first) != retry_key(second)


def test_text_with_lone_surrogates_has_an_identity() -> None:
    assert end(Message(Role.USER, "\ud800")) != end(Message(Role.USER, "\ud801"))


def test_every_result_is_identified_by_its_call() -> None:
    assert end(ASK, CALLS, *results("1", "2")) != end(ASK, CALLS, *results("1", "1"))


def test_the_retry_key_depends_on_the_stop_tokens() -> None:
    request = TurnRequest(Api.CHAT, "m", (ASK,))
    assert retry_key(request) != retry_key(replace(request, sampling=SamplingParams(stop_token_ids=(7,))))
