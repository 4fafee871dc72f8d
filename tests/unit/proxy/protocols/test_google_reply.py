"""Replies of Google's generateContent: whole, as events and as an array, all with the same answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.protocols.google.protocol import GoogleProtocol, StreamForm
from proxy.protocols.google.reply import ContentStream
from proxy.protocols.signatures import signature_of
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, TokenLogprob, ToolCallStart
from proxy.types import ToolCall, TurnRequest
from tests.unit.proxy.protocols.google_bodies import answered, body
from tokengrove.errors import EngineFailed
from tokengrove.reasons import FinishReason

CALL = ToolCall("c", "add", '{"a": 1}')
SHOWN = {"thinkingConfig": {"includeThoughts": True}}


def asked(form: StreamForm | None = None, **config: Any) -> TurnRequest:
    request = GoogleProtocol(form).parse(body(generationConfig=config))
    request.model = "m"
    return request


def whole(interaction: Any, **config: Any) -> Any:
    return GoogleProtocol().reply(asked(**config), [Answer(interaction)])


def streamed(form: StreamForm, deltas: list[Delta], interaction: Any, **config: Any) -> list[Any]:
    """The chunks of a reply, as its client reads them."""
    request = asked(form, **config)
    stream = GoogleProtocol(form).stream(request, "gen_1", 0, 5)
    out = stream.start() + stream.keepalive() + b"".join(stream.deltas([delta]) for delta in deltas)
    out += stream.finish([Answer(interaction)])
    if form is StreamForm.ARRAY:
        return list(json.loads(out))
    return [json.loads(event.removeprefix("data: ")) for event in out.decode().strip().split("\n\n")]


def parts(*chunks: Any) -> list[Any]:
    return [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]


def test_a_reply_has_thoughts_text_and_calls_with_one_signature() -> None:
    reply = whole(answered("Text.", CALL, reasoning="why", finish=FinishReason.TOOL_CALLS), **SHOWN)
    assert parts(reply) == [
        {"text": "why", "thought": True},
        {"text": "Text."},
        {"functionCall": {"id": "c", "name": "add", "args": {"a": 1}}, "thoughtSignature": signature_of("gen_1")},
    ]
    assert reply["candidates"][0]["finishReason"] == "STOP"
    assert (reply["modelVersion"], reply["responseId"]) == ("m", "gen_1")


def test_thoughts_are_shown_only_if_the_request_includes_them() -> None:
    hidden = parts(whole(answered("Text.", reasoning="why")))
    assert hidden == [{"text": "Text.", "thoughtSignature": signature_of("gen_1")}]
    chunks = streamed(
        StreamForm.EVENTS, [ReasoningDelta("why"), TextDelta("Text.")], answered("Text.", reasoning="why")
    )
    assert [part["text"] for part in parts(*chunks)] == ["Text.", ""]


def test_an_empty_answer_has_a_part() -> None:
    reply = whole(answered("", finish=FinishReason.LENGTH))
    assert parts(reply) == [{"text": ""}] and reply["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_arguments_that_are_no_object_are_kept() -> None:
    reply = whole(answered("", ToolCall("c", "add", "[1")))
    assert parts(reply)[0]["functionCall"]["args"] == {"_raw": "[1"}


def test_thoughts_count_apart_from_candidates() -> None:
    usage = whole(answered("x", reasoning="y", reasoning_tokens=1, cached_tokens=3))["usageMetadata"]
    assert usage == {
        **{"promptTokenCount": 5, "candidatesTokenCount": 1, "thoughtsTokenCount": 1, "totalTokenCount": 7},
        "cachedContentTokenCount": 3,
    }


@pytest.mark.parametrize("form", StreamForm)
def test_the_chunks_of_a_stream_join_to_the_whole_reply(form: StreamForm) -> None:
    interaction = answered('Te"xt.', CALL, reasoning="why", finish=FinishReason.TOOL_CALLS)
    deltas: list[Delta] = [ReasoningDelta("wh"), ReasoningDelta("y"), TextDelta('Te"'), TextDelta("xt.")]
    chunks = streamed(form, [*deltas, ToolCallStart(0, "c", "add")], interaction, **SHOWN)
    texts = parts(*chunks)
    reply = whole(interaction, **SHOWN)
    thoughts = "".join(part["text"] for part in texts if part.get("thought"))
    text = "".join(part["text"] for part in texts if "text" in part and not part.get("thought"))
    assert [{"text": thoughts, "thought": True}, {"text": text}, texts[-1]] == parts(reply)
    assert chunks[-1]["usageMetadata"] == reply["usageMetadata"]
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks] == [None] * 4 + ["STOP"]


def test_a_stream_shows_the_logprobs_of_its_text() -> None:
    token = TokenLogprob("a", b"a", -0.5, (TokenLogprob("b", b"b", -1.0),))
    request = asked(StreamForm.EVENTS, responseLogprobs=True, logprobs=1)
    chunk = json.loads(ContentStream(request, "gen_1").deltas([TextDelta("a", (token,))]).removeprefix(b"data: "))
    assert chunk["candidates"][0]["logprobsResult"] == {
        "chosenCandidates": [{"token": "a", "logProbability": -0.5}],
        "topCandidates": [{"candidates": [{"token": "b", "logProbability": -1.0}]}],
    }


@pytest.mark.parametrize("form", StreamForm)
def test_a_failed_stream_ends_with_the_error_as_plain_json(form: StreamForm) -> None:
    stream = GoogleProtocol(form).stream(asked(form), "gen_1", 0, 5)
    out = stream.start() + stream.deltas([TextDelta("x")]) + stream.error(EngineFailed("broken"))
    assert b"finishReason" not in out and not out.endswith(b"\n\n")
    last = json.loads(out)[-1] if form is StreamForm.ARRAY else json.loads(out.split(b"\n\n")[-1])
    assert last["error"]["message"] == "broken" and last["error"]["code"] >= 500
