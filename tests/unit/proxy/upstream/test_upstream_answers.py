"""Answers of external models: each API gives the same deltas and the same message, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from proxy.types import Message, Role, ToolCall
from proxy.upstream import client as client_module
from proxy.upstream.answer import UpstreamUsage
from proxy.upstream.events import Event, EventDecoder
from tests.unit.proxy.upstream.asking import asking, chat, joined
from tests.upstreams import KEY, FakeUpstream, Sent, Spoken, events_of, fake_upstream, plain, streamed
from tokengrove.options.model import UpstreamApi
from tokengrove.reasons import FinishReason

APIS = list(UpstreamApi)
CALLS = (("call_a", "look", ('{"at": ', '"the sky"}')), ("call_b", "add", ('{"x": 1, ', '"y": 2}')))
SAID = Spoken("Let me look.", "The user wants to know.", CALLS)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "add")]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("send", [streamed, plain])
async def test_text_reasoning_and_parallel_calls_arrive_as_they_were_said(api: UpstreamApi, send: Any) -> None:
    async with asking(api) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), send(SAID, api))
        assert joined(upstream.deltas) == [
            ("reasoning", "The user wants to know."),
            ("text", "Let me look."),
            ("call", "0", "call_a", "look"),
            (
                "arguments 0",
                '{"at": "the sky"}' if send is streamed or api is not UpstreamApi.MESSAGES else '{"at":"the sky"}',
            ),
            ("end", "0"),
            ("call", "1", "call_b", "add"),
            (
                "arguments 1",
                '{"x": 1, "y": 2}' if send is streamed or api is not UpstreamApi.MESSAGES else '{"x":1,"y":2}',
            ),
            ("end", "1"),
        ]
        arguments = [text for kind, text, *_ in joined(upstream.deltas) if kind.startswith("arguments")]
        calls = (ToolCall("call_a", "look", arguments[0]), ToolCall("call_b", "add", arguments[1]))
        message = Message(Role.ASSISTANT, "Let me look.", calls, reasoning="The user wants to know.")
        assert answer.message == message
        assert answer.finish is FinishReason.TOOL_CALLS
        assert answer.usage == UpstreamUsage(11, 7, 3, 2)
        assert answer.model == "judge-2026"


@pytest.mark.parametrize("api", APIS)
async def test_deltas_are_emitted_while_the_answer_still_arrives(api: UpstreamApi) -> None:
    arrived = asyncio.Event()
    async with asking(api) as upstream:
        half = next(at for at, event in enumerate(events_of(Spoken("two halves"), api)) if b'"two h"' in event)
        upstream.fake.answers.append(Sent(tuple(events_of(Spoken("two halves"), api)[: half + 1]), silent=True))
        upstream.on_delta = arrived.set
        asked = asyncio.create_task(upstream.ask(chat()))
        await arrived.wait()
        assert joined(upstream.deltas) == [("text", "two h")] and not asked.done()
        asked.cancel()
        await upstream.fake.left.wait()  # the connection of a cancelled request is closed


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_any_line_ends_comments_and_parts_give_the_same_events(api: UpstreamApi, size: int, end: bytes) -> None:
    events = events_of(SAID, api)
    stream = b"\xef\xbb\xbf: hello\n\n" + b": still there\n\n".join(events)
    stream = stream.rstrip(b"\n").replace(b"\n", end)  # the last event has no empty line
    decoder = EventDecoder()
    found = [event for at in range(0, len(stream), size) for event in decoder.feed(stream[at : at + size])]
    found += decoder.end()
    names = [event.removeprefix(b"event: ").partition(b"\n")[0].decode() for event in events]
    data = [event.rpartition(b"data: ")[2].rstrip() for event in events]
    assert [event.data for event in found] == data
    assert [event.name for event in found] == (names if api is not UpstreamApi.CHAT else [""] * len(events))


def test_the_lines_of_an_event_are_joined_and_its_other_fields_ignored() -> None:
    decoder = EventDecoder()
    text = b"id: 1\ndata:a\nretry: 9\ndata: b\n: c\ndata\n\nevent: only\n\ndata: d"
    assert [*decoder.feed(text), *decoder.end()] == [Event("", b"a\nb\n"), Event("", b"d")]


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_in_other_line_ends_and_parts_is_the_same(api: UpstreamApi) -> None:
    stream = b"".join(events_of(SAID, api)).replace(b"\n", b"\r\n")
    async with asking(api) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), Sent((stream[:100], stream[100:777], stream[777:])))
        assert answer.message.content == "Let me look." and len(answer.message.tool_calls) == 2


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_without_usage_has_unknown_counts(api: UpstreamApi) -> None:
    async with asking(api) as upstream:
        assert (await upstream.ask(chat(), Spoken(usage=False))).usage == UpstreamUsage()


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_that_is_cut_off_keeps_what_it_has(api: UpstreamApi) -> None:
    async with asking(api) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), Spoken("", "", (("call_a", "look", ('{"at": ',)),), cut=True))
        assert answer.finish is FinishReason.LENGTH
        assert answer.message.tool_calls == (ToolCall("call_a", "look", '{"at": '),)


@pytest.mark.parametrize("api", APIS)
async def test_a_call_without_arguments_has_an_empty_object(api: UpstreamApi) -> None:
    async with asking(api) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), Spoken("", "", (("call_a", "look", ()),)))
        assert answer.message.tool_calls == (ToolCall("call_a", "look", "{}"),)


@pytest.mark.parametrize("api", APIS)
async def test_arguments_that_are_no_json_are_the_models_mistake_and_passed_on(api: UpstreamApi) -> None:
    async with asking(api) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), Spoken("", "", (("call_a", "look", ('{"at": sky}',)),)))
        assert answer.message.tool_calls[0].arguments == '{"at": sky}'


@pytest.mark.parametrize("api", APIS)
async def test_the_connection_is_kept_for_the_next_request(api: UpstreamApi) -> None:
    async with asking(api) as upstream:
        for _ in range(3):
            await upstream.ask(chat())
        assert upstream.fake.connections == 1


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("silent", [True, False])
async def test_an_answer_is_complete_whatever_its_connection_does_then(
    api: UpstreamApi, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_REST_S", 0.01)
    async with asking(api) as upstream:
        answer = await upstream.ask(chat(), Sent(tuple(events_of(Spoken(), api)), whole=False, silent=silent))
        assert answer.message.content == "fine"


def chunks(*deltas: dict[str, Any], finish: str = "tool_calls") -> Sent:
    """A streamed chat completion with these deltas."""
    values: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    values.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return Sent(tuple(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values))


def piece(index: int | None, arguments: str, call_id: str = "", name: str = "") -> dict[str, Any]:
    """A delta of a chat completion with a piece of a tool call."""
    call: dict[str, Any] = {"function": {"arguments": arguments, **({"name": name} if name else {})}}
    call |= {"index": index} if index is not None else {}
    return {"tool_calls": [{**call, "id": call_id} if call_id else call]}


async def test_pieces_of_calls_that_alternate_are_told_one_call_after_the_other() -> None:
    sent = chunks(
        piece(0, '{"a":', "call_a", "look"),
        piece(1, '{"b":', "call_b", "add"),
        piece(0, "1}"),
        {"content": "so"},
        piece(1, "2}"),
    )
    async with asking(UpstreamApi.CHAT) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), sent)
        assert joined(upstream.deltas) == [
            *[("call", "0", "call_a", "look"), ("arguments 0", '{"a":1}'), ("end", "0")],
            *[("call", "1", "call_b", "add"), ("arguments 1", '{"b":2}'), ("end", "1")],
            ("text", "so"),
        ]
        assert [call.arguments for call in answer.message.tool_calls] == ['{"a":1}', '{"b":2}']


@pytest.mark.parametrize("index", [0, None])
async def test_calls_are_told_apart_by_their_ids_if_a_server_counts_them_wrongly(index: int | None) -> None:
    sent = chunks(
        piece(index, '{"a":', "call_a", "look"),
        piece(index, "1}", "call_a", "look"),
        piece(index, '{"b":2}', "call_b", "add"),
        finish="stop",
    )
    async with asking(UpstreamApi.CHAT) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), sent)
        assert answer.message.tool_calls == (
            ToolCall("call_a", "look", '{"a":1}'),
            ToolCall("call_b", "add", '{"b":2}'),
        )
        assert answer.finish is FinishReason.TOOL_CALLS


async def test_a_call_without_an_id_gets_one() -> None:
    async with asking(UpstreamApi.CHAT) as upstream:
        answer = await upstream.ask(chat(tools=TOOLS), chunks(piece(0, "{}", name="look")))
        assert answer.message.tool_calls[0].id.startswith("call_")


async def test_the_stop_sequence_that_ended_a_message_is_told() -> None:
    events = events_of(Spoken(), UpstreamApi.MESSAGES)
    stopped = [
        event.replace(b'"end_turn", "stop_sequence": null', b'"stop_sequence", "stop_sequence": "END"')
        for event in events
    ]
    async with asking(UpstreamApi.MESSAGES) as upstream:
        answer = await upstream.ask(chat(), Sent(tuple(stopped)))
        assert (answer.finish, answer.stop_string) == (FinishReason.STOP_STRING, "END")


async def test_a_summary_of_reasoning_is_reasoning() -> None:
    events = events_of(Spoken(reasoning="I thought."), UpstreamApi.RESPONSES)
    told = [
        event.replace(b"response.reasoning_text.delta", b"response.reasoning_summary_text.delta") for event in events
    ]
    async with asking(UpstreamApi.RESPONSES) as upstream:
        assert (await upstream.ask(chat(), Sent(tuple(told)))).message.reasoning == "I thought."


@pytest.fixture
async def fake() -> Any:
    async with fake_upstream() as found:
        found.answers.append(SAID)
        yield found


async def test_the_sdk_of_openai_reads_what_the_fake_model_says(fake: FakeUpstream) -> None:
    async with openai.AsyncOpenAI(base_url=fake.url, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        said = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in said) == SAID.text
        assert sum(len(delta.tool_calls or ()) for delta in said) == 6
        fake.answers.append(SAID)
        async with client.responses.stream(model="m", input="hi") as events:
            async for _ in events:
                pass
            response = await events.get_final_response()
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output_text == SAID.text


async def test_the_sdk_of_anthropic_reads_what_the_fake_model_says(fake: FakeUpstream) -> None:
    async with anthropic.AsyncAnthropic(base_url=fake.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as client:
        asked = client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        async with asked as stream:
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.stop_reason == "tool_use"
