"""Streamed responses: the order of events, the guarantees to clients, and what the SDK reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.lib.streaming.responses import ResponseStream as SdkStream
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from proxy.protocols.sse import KEEPALIVE
from proxy.rendering.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tests.unit.proxy.protocols.response_bodies import (
    PROTOCOL,
    WEATHER,
    assistant,
    check_events,
    committed,
    deltas_of,
    events_of,
    request,
    streamed,
)
from tokengrove.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    LimitReached,
    ProxyError,
    TooManyRequests,
)
from tokengrove.reasons import FinishReason

CALL = ("call_1", "weather", '{"city": "Rome"}')
FULL = assistant("wait", CALL, ("call_2", "weather", "{}"), reasoning="hm so")
ID = "resp_" + "ab" * 16


def sdk_reads(stream: bytes, read: Callable[[SdkStream[Any]], Any], **more: Any) -> Any:
    """Return the result of `read` on the SDK's stream over these bytes."""
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=stream))
    with (
        httpx.Client(transport=transport) as http,
        OpenAI(api_key="k", base_url="http://server/v1", http_client=http, max_retries=0) as client,
        client.responses.stream(model="m", input="hi", **more) as events,
    ):
        return read(events)


def event_types(stream: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events_of(stream)]


def test_the_events_of_a_whole_answer_are_in_the_order_of_the_contract() -> None:
    assert event_types(streamed(request(), committed(FULL), deltas_of(FULL, 20))) == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_an_empty_answer_is_an_empty_message() -> None:
    final = check_events(streamed(request(), committed(assistant(), finish=FinishReason.LENGTH)))
    assert (final["status"], final["output"][0]["content"][0]["text"]) == ("incomplete", "")


def test_a_cut_stream_ends_with_incomplete_and_so_does_its_last_item() -> None:
    final = check_events(streamed(request(), committed(FULL, finish=FinishReason.LENGTH)))
    assert [item["status"] for item in final["output"]] == ["completed", "completed", "completed", "incomplete"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}


def test_nothing_of_the_last_item_is_done_before_the_end() -> None:
    encoder = PROTOCOL.stream(request(), ID, 1, 1)
    sent = encoder.start() + b"".join(encoder.deltas([delta]) for delta in deltas_of(assistant("a", CALL)))
    assert sent.count(b"event: response.output_item.done") == 1
    assert b"event: response.function_call_arguments.done" not in sent


def test_text_after_a_call_is_a_separate_item_and_is_parsed_as_the_same_answer() -> None:
    deltas: list[Delta] = [
        *(TextDelta("a"), ToolCallStart(0, "call_1", "weather"), ToolCallArguments(0, "{}"), ToolCallEnd(0)),
        *(TextDelta("b"), ReasoningDelta("r"), ReasoningDelta("s"), TextDelta("c")),
    ]
    output = assistant("abc", ("call_1", "weather", "{}"), reasoning="rs")
    answer = committed(output)
    final = check_events(streamed(request(), answer, deltas))
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "message", "reasoning", "message"]
    (message,) = request(input=final["output"]).messages
    assert message == assistant("abc", ("call_1", "weather", "{}"), reasoning="rs", origin=answer.interaction.id)


def test_empty_deltas_are_no_events() -> None:
    encoder = PROTOCOL.stream(request(), ID, 1, 1)
    encoder.start()
    assert encoder.deltas([TextDelta("")]) == encoder.deltas([ReasoningDelta("")]) == b""


def test_a_keepalive_is_a_comment_and_takes_no_number() -> None:
    answer = committed(assistant("ab"), name=ID)
    encoder = PROTOCOL.stream(request(), ID, 1, 1)
    start, first, comment = encoder.start(), encoder.deltas([TextDelta("a")]), encoder.keepalive()
    check_events(start + first + encoder.deltas([TextDelta("b")]) + encoder.finish([answer]))
    assert comment == KEEPALIVE


def test_logprobs_go_with_the_text_and_are_whole_at_the_end() -> None:
    a, b, c = (TokenLogprob(text, text.encode(), -0.5) for text in "abc")
    answer = committed(assistant("abc"), logprobs=(a, b, c))
    turn = request(include=["message.output_text.logprobs"])
    stream = streamed(turn, answer, [TextDelta("ab", (a, b)), TextDelta("c")])
    deltas = [event for event in events_of(stream) if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["a", "b"], []]
    assert check_events(stream) == PROTOCOL.reply(turn, [answer])


def test_a_text_before_a_call_keeps_the_logprobs_streamed_with_it() -> None:
    wait, rest = TokenLogprob("wait", b"wait", -0.5), TokenLogprob("{}", b"{}", -0.5)
    output = assistant("wait", ("call_1", "weather", "{}"))
    answer = committed(output, logprobs=(wait, rest))
    turn = request(include=["message.output_text.logprobs"])
    stream = streamed(turn, answer, [TextDelta("wait", (wait,)), *deltas_of(output)[2:]])
    assert check_events(stream) == PROTOCOL.reply(turn, [answer])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailed("it died"), "server_error"),
        (EngineUnavailable("paused", retry_after_s=5), "server_error"),
        (ContextLengthExceeded(prompt_tokens=9, context_tokens=8), "context_length_exceeded"),
        (TooManyRequests("the queue is full"), "rate_limit_exceeded"),
        (LimitReached("no turns are left"), "invalid_prompt"),
    ],
)
def test_a_failure_is_an_event_with_the_output_so_far(error: ProxyError, code: str) -> None:
    encoder = PROTOCOL.stream(request(), ID, 1, 1)
    sent = encoder.start() + encoder.deltas([ReasoningDelta("hm")]) + encoder.deltas([TextDelta("wa")])
    final = check_events(sent + encoder.error(error))
    assert (final["status"], final["error"]) == ("failed", {"code": code, "message": error.message})
    assert [item["type"] for item in final["output"]] == ["reasoning"]


def test_a_full_queue_gives_the_retry_time_in_words_that_codex_parses() -> None:
    encoder = PROTOCOL.stream(request(), ID, 1, 1)
    final = check_events(encoder.start() + encoder.error(TooManyRequests("full", retry_after_s=2.0)))
    assert final["error"]["message"] == "full. Please try again in 2s."


@pytest.mark.parametrize("output", [FULL, assistant("hi"), assistant("", CALL), assistant(reasoning="r"), assistant()])
def test_the_sdk_reads_a_stream_as_the_unary_reply(output: Any) -> None:
    answer, turn = committed(output), request(tools=[WEATHER], include=["reasoning.encrypted_content"])
    final = sdk_reads(streamed(turn, answer), lambda events: events.get_final_response())
    assert final.output_text == output.content
    wire = PROTOCOL.reply(turn, [answer])
    got = final.to_dict()
    assert [item["id"] for item in got["output"]] == [item["id"] for item in wire["output"]]
    assert [item.get("arguments") for item in got["output"]] == [item.get("arguments") for item in wire["output"]]


def test_the_sdk_accumulates_the_same_text_and_arguments_as_the_done_events() -> None:
    def snapshots(events: SdkStream[Any]) -> dict[str, str]:
        return {event.item_id: event.snapshot for event in events if hasattr(event, "snapshot")}

    answer = committed(FULL)
    seen = sdk_reads(streamed(request(), answer), snapshots)
    assert sorted(seen.values()) == sorted(["wait", CALL[2], "{}"])


def test_each_event_is_valid_for_the_strict_types_of_the_sdk() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    token = TokenLogprob("wait", b"wait", -0.5, (TokenLogprob("wait", b"wait", -0.5),))
    turn = request(include=["message.output_text.logprobs", "reasoning.encrypted_content"], tools=[WEATHER])
    for finish in (FinishReason.STOP, FinishReason.LENGTH):
        answer = committed(FULL, finish=finish, logprobs=(token,))
        for event in events_of(streamed(turn, answer)):
            assert adapter.validate_python(event).type == event["type"]


def test_the_sdk_does_not_take_a_failed_stream_for_an_answer() -> None:
    encoder = PROTOCOL.stream(request(), ID, 1, 1)
    sent = encoder.start() + encoder.deltas([TextDelta("wa")]) + encoder.error(EngineFailed("it died"))
    with pytest.raises(RuntimeError):
        sdk_reads(sent, lambda events: events.get_final_response())
