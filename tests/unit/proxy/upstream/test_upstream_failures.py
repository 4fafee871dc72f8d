"""External models that fail and lie: what clients are told, and that nobody is told a key or an address."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.neutral_errors import neutral
from proxy.models.declared import Upstream
from proxy.protocols.error_envelopes import anthropic_error, openai_error
from proxy.upstream import client as client_module
from proxy.upstream.client import UpstreamClient
from tests.support import free_port
from tests.unit.proxy.upstream.asking import Asking, asking, chat, joined, no_images
from tests.upstreams import KEY, Sent, Spoken, events_of, failed
from tokengrove.errors import ConfigurationError, UpstreamFailed
from tokengrove.options.model import UpstreamApi

KINDS = list(UpstreamApi)
CHAT, RESPONSES, MESSAGES = KINDS
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLING = Spoken("", "", (("call_a", "look", ('{"at": ', '"the sky"}')),))
SILENT_S = 0.5


async def failure(upstream: Asking, *answers: Sent | Spoken) -> UpstreamFailed:
    with pytest.raises(UpstreamFailed) as caught:
        await upstream.ask(chat(tools=TOOLS), *answers)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("status", "ours", "retryable", "message"),
    [
        (400, 400, False, "the external model refuses the request with 400: too long"),
        (404, 404, False, "the external model refuses the request with 404: too long"),
        (413, 413, False, "the external model refuses the request with 413: too long"),
        (422, 422, False, "the external model refuses the request with 422: too long"),
        (429, 429, True, "the external model refuses the request with 429: too long"),
        (401, 502, True, "the external model refuses the key that the operator of this server has for it"),
        (403, 502, True, "the external model refuses the key that the operator of this server has for it"),
        (402, 502, True, "the external model fails with 402: too long"),
        (307, 502, True, "the external model redirects the request, which is never followed"),
        (500, 502, True, "the external model fails with 500: too long"),
        (529, 502, True, "the external model fails with 529: too long"),
        (504, 504, True, "the external model fails with 504: too long"),
    ],
)
async def test_the_status_is_passed_on_if_it_is_about_the_request(
    kind: UpstreamApi, status: int, ours: int, retryable: bool, message: str
) -> None:
    async with asking(kind) as upstream:
        error = await failure(
            upstream, failed(status, {"error": {"message": "too long", "type": "x"}}, retry_after="7")
        )
        assert (error.status, error.retryable, error.message) == (ours, retryable, message)
        assert error.retry_after_s == (None if status in (401, 403, 307) else 7.0)
        assert error.code == "upstream_failed" and len(upstream.fake.asked) == 1


async def test_a_redirect_is_not_followed() -> None:
    async with asking(CHAT) as upstream, asking(CHAT) as other:
        await failure(upstream, failed(307, {}, location=f"{other.fake.url}/chat/completions"))
        assert other.fake.asked == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"error": "no room"}, "no room"),
        ({"message": "no room"}, "no room"),
        ({"detail": [{"msg": "no room"}]}, '[{"msg":"no room"}]'),
        ({"error": {"message": "x" * 5000}}, "characters left out"),
        ({"error": {"message": f"{KEY} at 127.0.0.1"}}, "400: ... at ..."),
        ({"error": {"message": "y" * 130 + KEY + "y" * 400}}, "characters left out"),
    ],
)
async def test_the_models_own_words_are_shown_shortened_without_the_key_and_the_address(body: Any, shown: str) -> None:
    async with asking(CHAT) as upstream:
        message = (await failure(upstream, failed(400, body))).message
        assert shown in message and len(message) < 450 and "sk-" not in message


def test_each_api_has_its_own_words_for_a_failure() -> None:
    error = UpstreamFailed("it fails", status=422)
    assert openai_error(error)["error"] == {
        **{"message": "it fails", "type": "invalid_request_error", "param": None, "code": "upstream_failed"}
    }
    assert anthropic_error(error, "r")["error"] == {"type": "invalid_request_error", "message": "it fails"}
    assert openai_error(UpstreamFailed("it fails"))["error"]["type"] == "server_error"
    assert anthropic_error(UpstreamFailed("it fails", status=504), "r")["error"]["type"] == "timeout_error"


async def test_agents_do_not_see_addresses_and_the_log_does(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://localhost:{free_port()}/v1"
    client = UpstreamClient(Upstream(url, CHAT, "m", KEY, 60.0))
    request = chat()
    with caplog.at_level(logging.DEBUG), pytest.raises(UpstreamFailed) as caught:
        await client.answer(client.body(request, request.sampling), {}, lambda deltas: None, no_images)
    await client.close()
    shown = neutral(caught.value)
    assert shown.status == 502
    assert shown.message == "the external model cannot be reached; the server's log has the reason"
    (line,) = [record for record in caplog.records if record.name == "proxy.upstream.client"]
    assert line.getMessage() == "external model failed"
    assert isinstance(line.args, dict) and line.args["url"] == f"{url}/chat/completions"
    assert all(KEY not in f"{record.getMessage()} {record.args}" for record in caplog.records)
    assert KEY not in repr(client)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_log_line_has_the_key(kind: UpstreamApi, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with asking(kind) as upstream:
            await upstream.ask(chat())
            await failure(upstream, failed(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}))
    assert caplog.records and all(KEY not in f"{record.getMessage()} {record.args}" for record in caplog.records)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 2])
async def test_silence_is_a_timeout(kind: UpstreamApi, after: int) -> None:
    async with asking(kind, timeout_s=SILENT_S) as upstream:
        error = await failure(upstream, Sent(tuple(events_of(Spoken(), kind)[:after]), silent=True))
        assert (error.status, error.message) == (504, "the external model has sent nothing for 0.5 seconds")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_that_breaks_off_fails_wherever_it_does(kind: UpstreamApi, whole: bool) -> None:
    events = events_of(Spoken("fine", usage=False), kind)
    last = -2 if kind is CHAT else -1  # a chat completion is complete without its [DONE]
    async with asking(kind) as upstream:
        for end in range(len(events[:last]) + 1):
            error = await failure(upstream, Sent(tuple(events[:end]), whole=whole))
            assert error.status == 502 and "breaks off" in error.message


async def test_a_chat_completion_needs_no_done() -> None:
    events = events_of(Spoken("fine"), CHAT)
    async with asking(CHAT) as upstream:
        assert (await upstream.ask(chat(), Sent(tuple(events[:-1])))).message.content == "fine"


def changed(spoken: Spoken, kind: UpstreamApi, change: Callable[[bytes], bytes]) -> Sent:
    return Sent(tuple(map(change, events_of(spoken, kind))))


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_json_fails(kind: UpstreamApi) -> None:
    async with asking(kind) as upstream:
        events = events_of(Spoken(), kind)
        assert "is not JSON" in (await failure(upstream, Sent((*events[:2], b"data: {oops\n\n")))).message
        assert "no object" in (await failure(upstream, Sent((*events[:2], b"data: [1]\n\n")))).message
        assert "is not JSON" in (await failure(upstream, Sent((b"<html>",), kind="application/json"))).message
        html = await failure(upstream, Sent((b"<html>",), kind="text/html"))
        assert html.message.endswith("something that is no stream of events: text/html")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_stream_of_another_api_fails(kind: UpstreamApi) -> None:
    async with asking(kind) as upstream:
        for other in KINDS:
            if other is not kind:
                error = await failure(upstream, Sent(tuple(events_of(Spoken(), other))))
                assert "that is no" in error.message


@pytest.mark.parametrize("kind", KINDS)
async def test_a_plain_answer_that_is_none_fails(kind: UpstreamApi) -> None:
    async with asking(kind) as upstream:
        error = await failure(upstream, Sent((b'{"hello": 1}',), kind="application/json"))
        assert "something that is no" in error.message
        error = await failure(upstream, failed(200, {"error": {"message": "no room", "type": "rate_limit_error"}}))
        assert (error.status, error.message) == (429, "the external model refuses the request with 429: no room")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_a_name_fails(kind: UpstreamApi) -> None:
    async with asking(kind) as upstream:
        error = await failure(upstream, changed(CALLING, kind, lambda event: event.replace(b'"look"', b'""')))
        assert error.message == "the external model calls a tool without a name"


@pytest.mark.parametrize("kind", KINDS)
async def test_arguments_that_never_close_fail(kind: UpstreamApi) -> None:
    open_ended = Spoken("", "", (("call_a", "look", ('{"at": ',)),))
    async with asking(kind) as upstream:
        error = await failure(upstream, open_ended)
        assert error.message == "the external model never ends the arguments of a tool call"


@pytest.mark.parametrize("kind", [RESPONSES, MESSAGES])
async def test_a_call_whose_end_is_not_told_fails(kind: UpstreamApi) -> None:
    ends = (b"content_block_stop", b"output_item.done", b"arguments.done")
    events = [event for event in events_of(CALLING, kind) if not any(end in event for end in ends)]
    async with asking(kind) as upstream:
        error = await failure(upstream, Sent(tuple(events)))
        assert error.message == "the external model never ends a tool call"


async def test_arguments_that_differ_from_those_streamed_fail() -> None:
    def change(event: bytes) -> bytes:
        return event.replace(b"the sky", b"the sea") if b"arguments.done" in event else event

    async with asking(RESPONSES) as upstream:
        error = await failure(upstream, changed(CALLING, RESPONSES, change))
        assert "other arguments of a tool call" in error.message


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (CHAT, b'"finish_reason": "stop"', b'"finish_reason": "boredom"'),
        (CHAT, b'"finish_reason": "stop"', b'"finish_reason": {}'),
        (RESPONSES, b'"status": "completed", "incomplete_details"', b'"status": "bored", "incomplete_details"'),
        (MESSAGES, b'"stop_reason": "end_turn"', b'"stop_reason": "pause_turn"'),
    ],
)
async def test_an_unknown_end_fails_by_its_name(kind: UpstreamApi, before: bytes, after: bytes) -> None:
    async with asking(kind) as upstream:
        error = await failure(upstream, changed(Spoken(), kind, lambda event: event.replace(before, after)))
        assert "ends its answer for an unknown reason" in error.message


@pytest.mark.parametrize(
    ("kind", "lie", "message"),
    [
        (CHAT, {"choices": [{"index": 1, "delta": {}}]}, "several choices"),
        (CHAT, {"choices": [{"index": 0, "delta": {"content": 7}}]}, "'content' that is no text"),
        (CHAT, {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "tool_calls"}]}, "calls no tool"),
        (CHAT, {"choices": [3]}, "'choices' that is no list of objects"),
        (CHAT, {"choices": [{"delta": {"function_call": {"name": "x"}}}]}, "function_call"),
        (CHAT, {"choices": [{"delta": {"tool_calls": [{"index": "a"}]}}]}, "index is no number"),
        (RESPONSES, {"type": "response.output_text.delta", "delta": "x"}, "without an output_index"),
        (
            RESPONSES,
            {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": "x"},
            "has not begun",
        ),
        (MESSAGES, {"type": "content_block_delta", "index": 5, "delta": {}}, "has not begun"),
    ],
)
async def test_a_lie_is_named(kind: UpstreamApi, lie: Any, message: str) -> None:
    first = events_of(Spoken(), kind)[0]
    async with asking(kind) as upstream:
        sent = Sent((first, b"data: " + json.dumps(lie).encode() + b"\n\n", b"data: [DONE]\n\n"))
        assert message in (await failure(upstream, sent)).message


async def test_a_call_that_had_ended_cannot_continue() -> None:
    def delta(index: int, arguments: str, **more: Any) -> bytes:
        call = {"index": index, "function": {"arguments": arguments, "name": "look"}, **more}
        return b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]}).encode() + b"\n\n"

    sent = Sent((delta(0, "{}", id="a"), delta(1, "{}", id="b"), delta(0, "}")))
    async with asking(CHAT) as upstream:
        assert "continues a tool call that it had ended" in (await failure(upstream, sent)).message


@pytest.mark.parametrize(
    ("kind", "event", "status"),
    [
        (CHAT, {"error": {"message": "no room", "code": 503}}, 502),
        (CHAT, {"error": {"message": "no room", "type": "invalid_request_error", "code": None}}, 400),
        (RESPONSES, {"type": "error", "code": "rate_limit_exceeded", "message": "no room"}, 429),
        (RESPONSES, {"type": "response.failed",
                     "response": {"status": "failed", "error": {"code": "server_error", "message": "no room"}}}, 502),
        (MESSAGES, {"type": "error", "error": {"type": "overloaded_error", "message": "no room"}}, 502),
        (MESSAGES, {"type": "error", "error": {"type": "rate_limit_error", "message": "no room"}}, 429),
    ],
)  # fmt: skip
async def test_an_error_in_the_middle_of_a_stream_is_passed_on(kind: UpstreamApi, event: Any, status: int) -> None:
    events = events_of(Spoken(), kind)
    begun = next(at for at, each in enumerate(events) if b'"fi"' in each)
    async with asking(kind) as upstream:
        error = await failure(upstream, Sent((*events[: begun + 1], b"data: " + json.dumps(event).encode() + b"\n\n")))
        assert error.status == status and error.message.endswith(": no room")
        assert joined(upstream.deltas) == [("text", "fi")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", ["event-stream", "json"])
async def test_bytes_without_end_are_not_read(kind: UpstreamApi, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_BYTES", 100_000)
    kinds = {"event-stream": "text/event-stream", "json": "application/json"}
    async with asking(kind) as upstream:
        error = await failure(upstream, Sent((b"data: " + b"x" * 10_000,) * 20, kind=kinds[sent]))
        assert error.message == "the external model's answer has more than 100000 bytes"


async def test_a_compressed_answer_is_refused() -> None:
    async with asking(CHAT) as upstream:
        error = await failure(upstream, Sent((b"x",), headers=(("content-encoding", "gzip"),)))
        assert "content encoding" in error.message


@pytest.mark.parametrize("key", ["with space", "line\nend", "schlüssel"])
def test_a_key_that_cannot_be_sent_ends_the_start_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        UpstreamClient(Upstream("https://judge.test/v1", CHAT, "m", key, 60.0))
    assert key not in str(caught.value)


async def test_a_server_without_a_key_gets_none() -> None:
    for kind in KINDS:
        async with asking(kind, key=None) as upstream:
            await upstream.ask(chat())
            assert not {"authorization", "x-api-key"} & upstream.fake.asked[0].headers.keys()
