"""A fake external model on a real port. It speaks three APIs, streams, fails and lies; it knows nothing of this server.

Its answers are written by hand in the forms that the providers document, and the providers' SDKs read them.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tokengrove.options.model import UpstreamApi

KEY = "sk-the-key-of-the-operator"


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a fake model says. `calls`: id, name and pieces of the arguments. `prompt`, `output`: counts of tokens;
    `cached` and `thought` are parts of them."""

    text: str = "fine"
    reasoning: str = ""
    calls: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    cut: bool = False
    usage: bool = True
    prompt: int = 11
    output: int = 7
    cached: int = 3
    thought: int = 2


@dataclass(slots=True)
class Asked:
    """A request that a fake model received."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class Sent:
    """An answer, as pieces of its body. `whole`: the body ends; else the connection breaks off behind the pieces.

    `silent`: nothing follows them, and the connection stays open.
    """

    pieces: tuple[bytes, ...]
    status: int = 200
    kind: str = "text/event-stream"
    headers: tuple[tuple[str, str], ...] = ()
    whole: bool = True
    silent: bool = False


@dataclass(slots=True)
class FakeUpstream:
    """`answers`: what it sends next, in order; then, what `Spoken()` says in the API of the path."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    answers: deque[Sent | Spoken] = field(default_factory=deque)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        path = head.split()[1]
        self.asked.append(Asked(path, headers, body))
        sent = self.answers.popleft() if self.answers else Spoken()
        if isinstance(sent, Spoken):
            sent = streamed(sent, api_of(path))
        fields = {"content-type": sent.kind, "transfer-encoding": "chunked", **dict(sent.headers)}
        text = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"HTTP/1.1 {sent.status} Answer\r\n{text}\r\n".encode())
        for piece in sent.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if sent.silent:
            await reader.readexactly(1)
        if sent.whole:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return sent.whole


@asynccontextmanager
async def fake_upstream() -> AsyncIterator[FakeUpstream]:
    """Run a fake external model."""
    fake = FakeUpstream()
    listening = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        listening.close()


def api_of(path: str) -> UpstreamApi:
    """The API of a path."""
    return {
        "/v1/chat/completions": UpstreamApi.CHAT,
        "/v1/responses": UpstreamApi.RESPONSES,
        "/v1/messages": UpstreamApi.MESSAGES,
    }[path]


def streamed(spoken: Spoken, api: UpstreamApi) -> Sent:
    """What is said, as a stream of an API, one event in each piece."""
    return Sent(tuple(events_of(spoken, api)))


def plain(spoken: Spoken, api: UpstreamApi) -> Sent:
    """What is said, as an answer that is not streamed."""
    write = {
        UpstreamApi.CHAT: chat_answer,
        UpstreamApi.RESPONSES: response_answer,
        UpstreamApi.MESSAGES: message_answer,
    }[api]
    return Sent((json.dumps(write(spoken)).encode(),), kind="application/json")


def failed(status: int, body: Any, **headers: str) -> Sent:
    """An answer that is an error."""
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Sent((json.dumps(body).encode(),), status, "application/json", named)


def events_of(spoken: Spoken, api: UpstreamApi) -> list[bytes]:
    """The events of a stream."""
    if api is UpstreamApi.CHAT:
        return [*(_data(chunk) for chunk in chat_chunks(spoken)), b"data: [DONE]\n\n"]
    events = response_events(spoken) if api is UpstreamApi.RESPONSES else message_events(spoken)
    return [b"event: " + event["type"].encode() + b"\n" + _data(event) for event in events]


def _data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _halves(text: str) -> list[str]:
    return [part for part in (text[: len(text) // 2], text[len(text) // 2 :]) if part]


def _chat_usage(spoken: Spoken) -> dict[str, Any]:
    return {
        "prompt_tokens": spoken.prompt,
        "completion_tokens": spoken.output,
        "total_tokens": spoken.prompt + spoken.output,
        "prompt_tokens_details": {"cached_tokens": spoken.cached},
        "completion_tokens_details": {"reasoning_tokens": spoken.thought},
    }


def _chat_finish(spoken: Spoken) -> str:
    return "length" if spoken.cut else "tool_calls" if spoken.calls else "stop"


def chat_chunks(spoken: Spoken) -> list[dict[str, Any]]:
    """The chunks of a streamed chat completion."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": part} for part in _halves(spoken.reasoning)]
    deltas += [{"content": part} for part in _halves(spoken.text)]
    for index, (call_id, name, pieces) in enumerate(spoken.calls):
        function = {"name": name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "judge-2026"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _chat_finish(spoken)}]})
    return [*chunks, {**head, "choices": [], "usage": _chat_usage(spoken)}] if spoken.usage else chunks


def chat_answer(spoken: Spoken) -> dict[str, Any]:
    """A whole chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": spoken.text or None}
    if spoken.reasoning:
        message["reasoning_content"] = spoken.reasoning
    if spoken.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
            for call_id, name, pieces in spoken.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": _chat_finish(spoken)}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "judge-2026"}
    return {**head, "choices": [choice], "usage": _chat_usage(spoken)}


def _output(spoken: Spoken) -> list[dict[str, Any]]:
    """The output items of a response."""
    items: list[dict[str, Any]] = []
    if spoken.reasoning:
        text = {"type": "reasoning_text", "text": spoken.reasoning}
        items.append({"id": "rs_1", "type": "reasoning", "summary": [], "content": [text], "status": "completed"})
    if spoken.text:
        part = {"type": "output_text", "text": spoken.text, "annotations": []}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        items.append(message)
    for number, (call_id, name, pieces) in enumerate(spoken.calls):
        call = {"id": f"fc_{number}", "type": "function_call", "call_id": call_id, "name": name}
        items.append({**call, "arguments": "".join(pieces), "status": "incomplete" if spoken.cut else "completed"})
    return items


def response_answer(spoken: Spoken) -> dict[str, Any]:
    """A whole response."""
    details = {"reason": "max_output_tokens"} if spoken.cut else None
    usage = {
        "input_tokens": spoken.prompt,
        "output_tokens": spoken.output,
        "total_tokens": spoken.prompt + spoken.output,
        "input_tokens_details": {"cached_tokens": spoken.cached},
        "output_tokens_details": {"reasoning_tokens": spoken.thought},
    }
    return {
        **{"id": "resp_1", "object": "response", "created_at": 1, "model": "judge-2026", "error": None},
        **{"status": "incomplete" if spoken.cut else "completed", "incomplete_details": details},
        **{"output": _output(spoken), "usage": usage if spoken.usage else None, "tools": [], "tool_choice": "auto"},
        **{"parallel_tool_calls": True, "instructions": None, "metadata": {}, "temperature": 1.0, "top_p": 1.0},
    }


def response_events(spoken: Spoken) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    whole = response_answer(spoken)
    head = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": head}]
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            pieces = spoken.calls[int(item["id"].removeprefix("fc_"))][2]
            begun = {**item, "arguments": "", "status": "in_progress"}
            middle = [{"type": "response.function_call_arguments.delta", "delta": piece} for piece in pieces]
            if not spoken.cut:
                done = {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
                middle.append({**done, "name": item["name"]})
        else:
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            (part,) = item["content"]
            begun = {**item, "content": [], "status": "in_progress"}
            middle = [{"type": "response.content_part.added", "content_index": 0, "part": {**part, "text": ""}}]
            for half in _halves(part["text"]):
                middle.append({"type": f"response.{kind}.delta", "content_index": 0, "delta": half, "logprobs": []})
            end = {"type": f"response.{kind}.done", "content_index": 0, "text": part["text"], "logprobs": []}
            middle += [end, {"type": "response.content_part.done", "content_index": 0, "part": part}]
        events.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        events += [{**event, **at} for event in middle]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.incomplete" if spoken.cut else "response.completed", "response": whole})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _message_head(spoken: Spoken, content: Sequence[Any], stop: str | None) -> dict[str, Any]:
    usage = {"input_tokens": spoken.prompt - spoken.cached, "cache_read_input_tokens": spoken.cached}
    usage |= {"cache_creation_input_tokens": 0, "output_tokens": 1}
    return {
        **{"id": "msg_1", "type": "message", "role": "assistant", "model": "judge-2026", "content": content},
        **{"stop_reason": stop, "stop_sequence": None, "usage": usage if spoken.usage else {}},
    }


def _message_stop(spoken: Spoken) -> str:
    return "max_tokens" if spoken.cut else "tool_use" if spoken.calls else "end_turn"


def _message_usage(spoken: Spoken) -> dict[str, Any]:
    if not spoken.usage:
        return {}
    return {"output_tokens": spoken.output, "output_tokens_details": {"thinking_tokens": spoken.thought}}


def message_answer(spoken: Spoken) -> dict[str, Any]:
    """A whole message."""
    blocks: list[dict[str, Any]] = []
    if spoken.reasoning:
        blocks.append({"type": "thinking", "thinking": spoken.reasoning, "signature": "sig"})
    if spoken.text:
        blocks.append({"type": "text", "text": spoken.text})
    for call_id, name, pieces in spoken.calls:
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": json.loads("".join(pieces))})
    head = _message_head(spoken, blocks, _message_stop(spoken))
    return {**head, "usage": {**head["usage"], **_message_usage(spoken)}}


def message_events(spoken: Spoken) -> list[dict[str, Any]]:
    """The events of a streamed message."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if spoken.reasoning:
        deltas = [{"type": "thinking_delta", "thinking": part} for part in _halves(spoken.reasoning)]
        signed = {"type": "signature_delta", "signature": "sig"}
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, [*deltas, signed]))
    if spoken.text:
        pieces = [{"type": "text_delta", "text": part} for part in _halves(spoken.text)]
        blocks.append(({"type": "text", "text": ""}, pieces))
    for call_id, name, parts in spoken.calls:
        begun = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        blocks.append((begun, [{"type": "input_json_delta", "partial_json": part} for part in ("", *parts)]))
    events: list[dict[str, Any]] = [{"type": "message_start", "message": _message_head(spoken, [], None)}]
    events.append({"type": "ping"})
    for index, (block, changes) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": change} for change in changes]
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": _message_stop(spoken), "stop_sequence": None}
    events.append({"type": "message_delta", "delta": stop, "usage": _message_usage(spoken)})
    return [*events, {"type": "message_stop"}]
