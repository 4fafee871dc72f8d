"""Replies of the Messages API, whole and streamed: the anthropic SDK reads them, and replayed they parse back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message as SdkMessage
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.error_envelopes import anthropic_error
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.signatures import origin_of, signature_of
from proxy.protocols.tool_inputs import arguments_of, input_of
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.trajectory.matching import canonical_arguments
from proxy.types import Interaction, Message, ToolCall
from tests.unit.proxy.protocols.message_bodies import answered, body, claude_code, says
from tokengrove.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
)
from tokengrove.reasons import FinishReason

CALL = ToolCall("toolu_1", "Read", '{"path": "a", "n": 1.5}')
BARE = ToolCall("call_2", "Now", "")
REQUEST = MessagesProtocol().parse(body())
EVERYTHING = answered("So:", CALL, BARE, reasoning="let me see", finish=FinishReason.TOOL_CALLS, cached_tokens=2)


def whole(interaction: Interaction) -> dict[str, Any]:
    return MessagesProtocol().reply(REQUEST, [Answer(interaction)])


def deltas_of(message: Message, cut: Sequence[int] = ()) -> list[Delta]:
    """Draw the deltas that an output parser could give for `message`, its texts cut in random places."""
    out: list[Delta] = [ReasoningDelta(piece) for piece in pieces(message.reasoning or "", cut)]
    out += [TextDelta(piece) for piece in pieces(message.content, cut)]
    for index, call in enumerate(message.tool_calls):
        out.append(ToolCallStart(index, call.id, call.name))
        out += [ToolCallArguments(index, piece) for piece in pieces(call.arguments, cut)]
        out.append(ToolCallEnd(index))
    return out


def pieces(text: str, cut: Sequence[int]) -> Iterator[str]:
    places = sorted({place % (len(text) + 1) for place in cut} | {0, len(text)})
    return (text[start:end] for start, end in pairwise(places))


def streamed(interaction: Interaction, cut: Sequence[int] = (), keepalives: bool = False) -> bytes:
    stream = MessagesProtocol().stream(REQUEST, interaction.id, 0, interaction.prompt_tokens)
    out = stream.start()
    for delta in deltas_of(interaction.output, cut):
        out += stream.deltas([delta]) + (stream.keepalive() if keepalives else b"")
    return out + stream.finish([Answer(interaction)])


def events(stream: bytes) -> list[dict[str, Any]]:
    """Decode the events of a stream; checks that each is named like its payload's type."""
    out = []
    assert stream.endswith(b"\n\n")
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        out.append(payload)
    return out


def check_order(found: list[dict[str, Any]]) -> None:
    """Check the order that the API promises: blocks are sequential, each closed before the next begins."""
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    allowed = {"text": {"text_delta"}, "thinking": {"thinking_delta"}, "tool_use": {"input_json_delta"}}
    count, block, signed = 0, None, False
    for event in (event for event in found[2:-2] if event["type"] != "ping"):
        if event["type"] == "content_block_start":
            assert block is None and event["index"] == count
            block, signed = event["content_block"]["type"], False
        elif event["type"] == "content_block_delta":
            assert block is not None and event["index"] == count and not signed
            signed = event["delta"]["type"] == "signature_delta"
            assert event["delta"]["type"] in allowed[block] or (signed and block == "thinking")
        else:
            assert event["type"] == "content_block_stop" and event["index"] == count
            assert signed == (block == "thinking")
            count, block = count + 1, None
    assert block is None


def client_of(content: bytes, kind: str = "text/event-stream", status: int = 200) -> anthropic.Anthropic:
    """Return an SDK client of a server that always gives this answer."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, headers={"content-type": kind}, content=content)

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    return anthropic.Anthropic(api_key="k", base_url="http://t", http_client=http, max_retries=0)


def accumulated(content: bytes) -> SdkMessage:
    """Return the message that the SDK's stream helper reads from a stream."""
    with client_of(content) as client:
        stream = client.messages.stream(model="m", max_tokens=64, messages=[{"role": "user", "content": "hi"}])
        with stream as found:
            return found.get_final_message()


def as_dict(message: SdkMessage) -> dict[str, Any]:
    return json.loads(message.to_json(exclude_unset=True, exclude_none=True))


def echoed(content: Any) -> Message:
    return MessagesProtocol().parse(body(says("user", "hi"), says("assistant", content), says("user", "x"))).messages[1]


def assert_the_same(found: Message, interaction: Interaction) -> None:
    output = interaction.output
    assert (found.content, found.reasoning) == (output.content, output.reasoning)
    assert [(call.id, call.name) for call in found.tool_calls] == [(call.id, call.name) for call in output.tool_calls]
    for ours, theirs in zip(output.tool_calls, found.tool_calls, strict=True):
        assert canonical_arguments(ours.arguments) == canonical_arguments(theirs.arguments)
    assert found.origin == (interaction.id if output.reasoning else None)


def test_a_whole_reply_has_the_shape_of_the_api() -> None:
    assert whole(EVERYTHING) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "let me see", "signature": signature_of("msg_1")},
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a", "n": 1.5}},
            {"type": "tool_use", "id": "call_2", "name": "Now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize("interaction", [EVERYTHING, answered("hi"), answered(), answered("", CALL)])
def test_the_sdk_reads_a_whole_reply(interaction: Interaction) -> None:
    reply = whole(interaction)
    assert as_dict(SdkMessage.model_validate(reply, strict=True)) == without_none(reply)
    with client_of(json.dumps(reply).encode(), "application/json") as client:
        said = client.messages.create(model="m", max_tokens=64, messages=[{"role": "user", "content": "hi"}])
    assert as_dict(said) == without_none(reply)


def without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def test_a_stream_has_the_events_of_the_api_in_order() -> None:
    found = events(streamed(answered("hi", CALL, reasoning="hm", finish=FinishReason.TOOL_CALLS, cached_tokens=2)))
    check_order(found)
    start = found[0]["message"]
    assert start["usage"] == {
        "input_tokens": 5,
        "output_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    opened = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert opened == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}},
    ]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (found[-2]["usage"]["input_tokens"], found[-2]["usage"]["cache_read_input_tokens"]) == (3, 2)
    assert found[-1] == {"type": "message_stop"}


def test_no_block_that_may_be_the_last_is_closed_before_the_end() -> None:
    stream = MessagesProtocol().stream(REQUEST, "msg_1", 0, 5)
    stream.start()
    sent = b"".join(stream.deltas([delta]) for delta in deltas_of(answered("hi", CALL).output))
    assert [event["index"] for event in events(sent) if event["type"] == "content_block_stop"] == [0]


@pytest.mark.parametrize("interaction", [EVERYTHING, answered("hi"), answered(), answered("", CALL, BARE)])
def test_the_sdk_makes_the_whole_reply_of_a_stream(interaction: Interaction) -> None:
    assert as_dict(accumulated(streamed(interaction))) == without_none(whole(interaction))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARGUMENTS = st.dictionaries(TEXTS, st.integers(-9, 9) | TEXTS | st.lists(TEXTS, max_size=2), max_size=3)
CALLS = st.lists(ARGUMENTS.map(json.dumps), max_size=3)


@given(TEXTS, TEXTS, CALLS, st.lists(st.integers(0, 60), max_size=6))
def test_a_stream_gives_the_same_message_under_every_chunking(
    content: str, reasoning: str, calls: list[str], cut: list[int]
) -> None:
    made = [ToolCall(f"toolu_{index}", "f", arguments) for index, arguments in enumerate(calls)]
    interaction = answered(content, *made, reasoning=reasoning or None)
    stream = streamed(interaction, cut, keepalives=True)
    check_order(events(stream))
    message = accumulated(stream)
    assert as_dict(message) == without_none(whole(interaction))
    assert_the_same(echoed(as_dict(message)["content"]), interaction)


@given(TEXTS, TEXTS, CALLS)
def test_a_replayed_reply_parses_to_the_original_answer(content: str, reasoning: str, calls: list[str]) -> None:
    made = [ToolCall(f"toolu_{index}", "f", arguments) for index, arguments in enumerate(calls)]
    interaction = answered(content, *made, reasoning=reasoning or None)
    assert_the_same(echoed(whole(interaction)["content"]), interaction)


def test_an_answer_without_a_call_may_be_echoed_as_a_string() -> None:
    assert echoed("So:").content == "So:"


def test_text_after_a_call_and_thinking_after_text_get_separate_blocks() -> None:
    stream = MessagesProtocol().stream(REQUEST, "msg_1", 0, 5)
    mixed: list[Delta] = [
        TextDelta("a"),
        ReasoningDelta("b"),
        ToolCallStart(0, "t", "f"),
        ToolCallEnd(0),
        TextDelta("c"),
    ]
    sent = stream.start() + b"".join(stream.deltas([delta]) for delta in mixed)
    content = as_dict(accumulated(sent + stream.finish([Answer(answered())])))["content"]
    assert [block["type"] for block in content] == ["text", "thinking", "tool_use", "text"]
    message = echoed(content)
    assert (message.content, message.reasoning, len(message.tool_calls)) == ("ac", "b", 1)


@pytest.mark.parametrize("arguments", ["[1, 2]", '"text"', "not json", '{"a": ', "  7"])
def test_replayed_arguments_that_are_not_an_object_are_unchanged(arguments: str) -> None:
    interaction = answered("", ToolCall("toolu_1", "f", arguments))
    assert input_of(arguments) == {"_raw": arguments}
    assert echoed(whole(interaction)["content"]).tool_calls == interaction.output.tool_calls
    assert arguments_of({"_raw": arguments}, "x") == arguments


@pytest.mark.parametrize("cut", [(), (1,), (1, 2, 3)])
@pytest.mark.parametrize("arguments", ["[1, 2]", ' "text"', "  7"])
def test_a_stream_only_sends_objects_as_tool_input(arguments: str, cut: tuple[int, ...]) -> None:
    interaction = answered("", ToolCall("toolu_1", "f", arguments), CALL)
    assert as_dict(accumulated(streamed(interaction, cut))) == without_none(whole(interaction))


def test_an_input_that_only_looks_like_raw_arguments_is_left_alone() -> None:
    for tool_input in ({"_raw": "{}"}, {"_raw": 1}, {"_raw": "x", "other": 1}):
        assert json.loads(arguments_of(tool_input, "x")) == tool_input


def test_no_more_tokens_are_reported_as_cached_than_the_prompt_has() -> None:
    usage = whole(answered("x", cached_tokens=7))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 5)


@pytest.mark.parametrize(
    ("interaction", "reason", "sequence"),
    [
        (answered("x"), "end_turn", None),
        (answered("x", finish=FinishReason.LENGTH), "max_tokens", None),
        (answered("", finish=FinishReason.LENGTH, output=()), "model_context_window_exceeded", None),
        (answered("x", finish=FinishReason.STOP_STRING, stop_string="END"), "stop_sequence", "END"),
        (answered("", CALL, finish=FinishReason.TOOL_CALLS), "tool_use", None),
        (answered("", CALL, finish=FinishReason.LENGTH), "max_tokens", None),
        (answered("x", finish=FinishReason.CONTENT_FILTER), "refusal", None),
    ],
)
def test_stop_reasons(interaction: Interaction, reason: str, sequence: str | None) -> None:
    for message in (whole(interaction), accumulated(streamed(interaction)).to_dict()):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_signature_names_its_interaction_and_a_foreign_one_names_none() -> None:
    assert origin_of(signature_of("msg_ü")) == "msg_ü"
    for foreign in (None, 3, "", "x", "ErUBCkYIBBgCIkD=", "dG9rZW5ncm92ZQ==", "ü", "/////w=="):
        assert origin_of(foreign) is None


def test_a_reply_to_claude_code_echoes_the_name_of_its_model() -> None:
    request = MessagesProtocol().parse(claude_code(says("user", "hi")))
    assert MessagesProtocol().reply(request, [Answer(EVERYTHING)])["model"] == "claude-opus-4-6"


def test_ids_are_those_of_the_api() -> None:
    ids = {MessagesProtocol().new_id() for _ in range(9)}
    assert len(ids) == 9
    assert all(name.startswith("msg_") for name in ids)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineUnavailable("paused"), "overloaded_error"),
        (EngineFailed("crashed"), "api_error"),
        (EngineTimeout("slow"), "timeout_error"),
        (ProxyError("unforeseen"), "api_error"),
    ],
)
def test_a_failure_in_a_stream_is_an_error_event_that_the_sdk_raises(error: ProxyError, kind: str) -> None:
    stream = MessagesProtocol().stream(REQUEST, "msg_1", 0, 5)
    sent = stream.start() + stream.deltas([TextDelta("a")]) + stream.error(error)
    assert events(sent)[-1] == {"type": "error", "error": {"type": kind, "message": error.message}}
    with pytest.raises(anthropic.APIStatusError, match=error.message):
        accumulated(sent)


def test_the_error_envelope_is_anthropics() -> None:
    assert anthropic_error(InvalidRequest("no"), "req_1") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "no"},
        "request_id": "req_1",
    }


def test_a_prompt_too_long_gives_the_message_that_makes_claude_code_compact() -> None:
    error = ContextLengthExceeded(prompt_tokens=210_000, context_tokens=200_000)
    assert anthropic_error(error, "r")["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 210000 tokens > 200000 maximum",
    }
