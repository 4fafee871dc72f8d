"""A stream carries the unary reply in chunks; its end comes after the commit, and failures are events."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import proxy.turns.turns
from proxy.api import replies
from proxy.app import build_app
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.settings import Settings
from tests.support import Server, call_text, function_tool, sampled, says, serving, tiny_renderer, until, user
from tests.wide import CROSSED
from tokengrove.errors import EngineUnavailable

CHAT = "/s/v1/chat/completions"
BODY = {"model": "my-model", "messages": [user("hi")], "stream": True}
ADD = [function_tool("add", {"a": {"type": "integer"}})]


async def stream(server: Server, **more: Any) -> list[Any]:
    """The decoded events of one streamed turn; `[DONE]` stays a string."""
    response = await server.post(CHAT, {**BODY, **more})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def events(text: str) -> list[Any]:
    out = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        assert len(lines) <= 1, block
        for line in lines:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            out.append(data if data == "[DONE]" else json.loads(data))
    return out


def deltas(chunks: list[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


async def test_chunks_come_in_the_order_of_the_api(tmp_path: Path) -> None:
    async with serving(tmp_path, says("<think>\nbecause\n</think>\n\nyes, indeed")) as server:
        *chunks, done = await stream(server)
        assert done == "[DONE]"
        (node,) = await server.tree()
        heads = {(chunk["id"], chunk["object"], chunk["model"], chunk["created"]) for chunk in chunks}
        assert heads == {(node["id"], "chat.completion.chunk", "my-model", chunks[0]["created"])}
        assert all(set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"} for chunk in chunks)
        assert all("usage" not in chunk for chunk in chunks)
        first, *middle, last = deltas(chunks)
        assert first == {"role": "assistant", "content": ""}
        kinds = [next(iter(delta)) for delta in middle]
        assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"reasoning_content", "content"}
        assert "".join(delta.get("reasoning_content", "") for delta in middle).strip() == "because"
        assert "".join(delta.get("content", "") for delta in middle) == "yes, indeed"
        assert last == {}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/s/v1/responses", {"model": "m", "input": "hi", "stream": True}),
        ("/s/v1/messages", {"model": "m", "max_tokens": 9, "messages": [user("hi")], "stream": True}),
    ],
)
async def test_a_stream_tells_reverse_proxies_not_to_buffer_or_cache_it(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """nginx buffers a response of a proxied server unless it has `x-accel-buffering: no`."""
    async with serving(tmp_path, says("yes")) as server:
        response = await server.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"


async def test_usage_is_one_last_chunk_on_request(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        *chunks, usage, done = await stream(server, stream_options={"include_usage": True})
        assert done == "[DONE]" and usage["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["id"] == chunks[0]["id"]
        (node,) = await server.tree()
        counts = (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"])
        assert counts == (node["prompt_tokens"], node["output_tokens"])
        assert usage["usage"]["total_tokens"] == sum(counts)
        *chunks, done = await stream(server, stream_options={"include_usage": False})
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_a_tool_call_has_its_name_in_the_first_chunk_and_arguments_in_the_others(tmp_path: Path) -> None:
    calls = "sure " + call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": 22}')
    async with serving(tmp_path, says(calls)) as server:
        *chunks, _ = await stream(server, tools=ADD)
        pieces = [call for delta in deltas(chunks) for call in delta.get("tool_calls", [])]
        assert sorted({piece["index"] for piece in pieces}) == [0, 1]
        for index, arguments in ((0, {"a": 1}), (1, {"a": 22})):
            first, *rest = (piece for piece in pieces if piece["index"] == index)
            assert set(first) == {"index", "id", "type", "function"} and first["type"] == "function"
            assert first["function"]["name"] == "add"
            assert all(set(piece) == {"index", "function"} for piece in rest)
            assert all(set(piece["function"]) == {"arguments"} for piece in rest)
            text = first["function"]["arguments"] + "".join(piece["function"]["arguments"] for piece in rest)
            assert json.loads(text) == arguments
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert "".join(delta.get("content") or "" for delta in deltas(chunks)).strip() == "sure"


@CROSSED
@pytest.mark.parametrize("chunk", [1, 2, 7, 99])
@pytest.mark.parametrize(
    "more",
    [{}, {"tools": ADD}, {"max_tokens": 4}, {"stop": ["two"]}, {"tools": ADD, "tool_choice": "none"}],
)
async def test_a_stream_carries_the_unary_reply(tmp_path: Path, chunk: int, more: dict[str, Any]) -> None:
    text = "<think>\nhm 😀\n</think>\n\none two 日本 " + call_text("add", '{"a": 1}')
    async with serving(tmp_path, play([Reply(sampled(text), chunk=chunk)] * 2)) as server:
        *chunks, _ = await stream(server, **more)
        reply = await server.ok(CHAT, {**BODY, "stream": False, **more})
        message, choice = reply["choices"][0]["message"], chunks[-1]["choices"][0]
        joined = deltas(chunks)
        assert "".join(delta.get("content") or "" for delta in joined) == (message["content"] or "")
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in joined)
        assert reasoning == (message.get("reasoning_content") or "")
        assert choice["finish_reason"] == reply["choices"][0]["finish_reason"]
        assert any("tool_calls" in delta for delta in joined) == ("tool_calls" in message)


@pytest.mark.parametrize("tools", [[], ADD])
async def test_a_failure_in_the_middle_is_an_error_event_and_never_a_clean_end(tmp_path: Path, tools: Any) -> None:
    text = "one two three " + call_text("add", '{"a": 1}')
    for fault in (Fault.ERROR, Fault.CUT):
        folder = tmp_path / fault.value
        folder.mkdir()
        reply = Reply(sampled(text), fault=fault, fault_after=3)
        async with serving(folder, play([reply])) as server:
            *chunks, last = await stream(server, tools=tools, stream_options={"include_usage": True})
            assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
            assert last["error"]["code"] == "engine_failed"
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
            (node,) = await server.tree()
            assert (node["status"], node["output_tokens"]) == ("failed", 3)
            assert await server.export() == []


def unavailable(request: GenerateRequest) -> Reply:
    raise EngineUnavailable("paused", retry_after_s=2)


@pytest.mark.parametrize(
    ("script", "settings", "status"),
    [
        (play([Reply(sampled("x"), fault=Fault.ERROR)]), {}, 502),
        (play([Reply(sampled("x"), fault=Fault.HANG)]), {"engine_timeout_s": 0.05}, 504),
        (unavailable, {}, 503),
        (says("x"), {"max_context_tokens": 3}, 400),
    ],
)
async def test_a_failure_before_the_first_token_is_an_http_status(
    tmp_path: Path, script: Script, settings: dict[str, Any], status: int
) -> None:
    async with serving(tmp_path, script, **settings) as server:
        response = await server.post(CHAT, BODY)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"]
        if status == 503:
            assert response.headers["retry-after"] == "2"


async def raw_stream(server: Server, on_data: Callable[[bytes], Any], **more: Any) -> None:
    """Run one streamed turn directly over ASGI; `on_data` gets each piece when it is sent."""
    body = json.dumps({**BODY, **more}).encode()
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        message = next(received, None)
        return message if message is not None else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            result = on_data(message["body"])
            if asyncio.iscoroutine(result):
                await result

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"host", b"t"), (b"content-type", b"application/json")],
        "scheme": "http",
        "server": ("t", 80),
        "root_path": "",
        "http_version": "1.1",
    }
    await server.app(scope, receive, send)


@pytest.mark.parametrize("calls", [0, 1, 2])
async def test_the_end_and_every_call_are_sent_only_after_the_commit(tmp_path: Path, calls: int) -> None:
    text = "hello " + ("\n".join([call_text("add", '{"a": 1}')] * calls) or "world")
    async with serving(tmp_path, says(text)) as server:
        late: list[bytes] = []

        seen: list[bytes] = []

        async def look(data: bytes) -> None:
            stored = len(await server.app.state.store.recordings.load_interactions("s"))
            seen.append(data)
            if has_whole_call(b"".join(seen)) or b'"finish_reason":"' in data or b"[DONE]" in data:
                late.append(data)
                assert stored == 1, data

        await raw_stream(server, look, tools=ADD)
        assert late and late[-1].endswith(b"data: [DONE]\n\n")


def has_whole_call(stream: bytes) -> bool:
    """Whether a client could already parse the arguments of a call."""
    arguments: defaultdict[int, str] = defaultdict(str)
    for chunk in events(stream.decode()):
        for choice in chunk["choices"] if chunk != "[DONE]" else []:
            for call in choice["delta"].get("tool_calls") or []:
                arguments[call["index"]] += call["function"].get("arguments") or ""
    return any(_is_json(text) for text in arguments.values())


def _is_json(text: str) -> bool:
    try:
        return bool(json.loads(text))
    except ValueError:
        return False


async def test_text_is_sent_as_it_is_sampled(tmp_path: Path) -> None:
    reply = Reply(sampled("one two three"), fault=Fault.HANG, fault_after=2)
    async with serving(tmp_path, play([reply])) as server:
        seen: list[bytes] = []
        turn = asyncio.create_task(raw_stream(server, seen.append))
        await until(lambda: any(b'"content":"one' in data for data in seen))
        assert not any(b"[DONE]" in data for data in seen)
        await server.engine.abort(server.engine.requests[0].request_id)
        await turn
        assert b'"error"' in seen[-1]


async def test_a_silent_stream_is_kept_alive_with_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "KEEPALIVE_S", 0.01)
    reply = Reply(sampled("one two"), fault=Fault.HANG, fault_after=1)
    async with serving(tmp_path, play([reply])) as server:
        seen: list[bytes] = []
        turn = asyncio.create_task(raw_stream(server, seen.append))
        await until(lambda: b"".join(seen).count(b": keepalive\n") >= 3)
        await server.engine.abort(server.engine.requests[0].request_id)
        await turn
        chunks = events(b"".join(seen).decode())
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and "error" in chunks[-1]


async def test_x_tokengrove_headers_are_recorded(tmp_path: Path) -> None:
    headers = {"x-tokengrove-state-hash": "abc", "x-tokengrove-purpose": "title", "x-tokengrove-agent": "planner"}
    async with serving(tmp_path, says("a", "b")) as server:
        for streams in (True, False):
            response = await server.post(CHAT, {**BODY, "stream": streams}, headers=headers)
            assert response.status_code == 200
        stored = await server.app.state.store.recordings.load_interactions("s")
        assert [(i.state_hash, i.purpose, i.agent) for i in stored] == [("abc", "title", "planner")] * 2


async def test_metrics_count_reasons_and_unaligned_turns(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three"), thinking_retention="template") as server:
        answer = await server.answer([user("q")])
        await server.answer([user("q"), answer, user("more")])
        await server.answer([user("q")])
        text = (await server.http.get("/metrics")).text
        counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        tree = await server.tree()
        for reason in {node["reason"] for node in tree}:
            wanted = sum(node["reason"] == reason for node in tree)
            assert float(counts[f'tokengrove_interactions_total{{reason="{reason}"}}']) == wanted
        unaligned = sum(node["parent_id"] is not None and not node["aligned"] for node in tree)
        assert float(counts["tokengrove_unaligned_total"]) == unaligned == 1
        shown = (await server.http.get("/rl/sessions/s")).json()
        assert shown["unaligned"] == unaligned and sum(shown["reasons"].values()) == 3


# A real server and clients that hang up -----------------------------------------------------------------------------


@contextmanager
def listening(folder: Path, script: Script) -> Iterator[tuple[ScriptedEngine, int]]:
    """Run uvicorn in a thread on the scripted engine; yield the engine and the port."""
    engine = ScriptedEngine(script, vocab_size=tiny_renderer().vocab_size)
    configured = Settings(database_url=f"sqlite:///{folder / 'test.db'}")
    app = build_app(configured, engine=engine, renderer=tiny_renderer())
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield engine, listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def post(port: int, body: Any) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
    return connection


def shown(port: int) -> list[Any]:
    response = httpx.get(f"http://127.0.0.1:{port}/rl/sessions/s")
    return response.json()["interactions"] if response.status_code == 200 else []


@pytest.mark.parametrize("streams", [True, False])
async def test_a_disconnect_aborts_the_generation_and_is_recorded(
    tmp_path: Path, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.05)
    hangs = Reply(sampled("one two three"), fault=Fault.HANG, fault_after=2)
    with listening(tmp_path, play([hangs, Reply(sampled("fine"))])) as (engine, port):
        connection = await asyncio.to_thread(post, port, {**BODY, "stream": streams})
        await until(lambda: bool(engine.requests))
        if streams:
            assert b"one" in await asyncio.to_thread(read_until, connection, b"one")
        assert engine.running == [engine.requests[0].request_id]
        connection.close()
        await until(lambda: not engine.running)
        await until(lambda: bool(shown(port)))
        nodes = shown(port)
        assert [node["status"] for node in nodes] == ["aborted"]
        assert nodes[0]["output_tokens"] == 2
        assert engine._running == {}
        with await asyncio.to_thread(post, port, {**BODY, "stream": False}) as again:
            assert b"fine" in await asyncio.to_thread(read_until, again, b"fine")


async def test_a_generation_that_ends_within_the_grace_period_is_complete(tmp_path: Path) -> None:
    """A generation whose client left may end within the grace period: it is then complete, though not read."""
    reply = Reply(sampled("one two"), delay_s=0.1)
    with listening(tmp_path, play([reply])) as (engine, port):
        connection = await asyncio.to_thread(post, port, {**BODY, "stream": False})
        await until(lambda: bool(engine.requests))
        connection.close()
        await until(lambda: bool(shown(port)))
        nodes = shown(port)
        assert [node["status"] for node in nodes] == ["complete"]


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        piece = connection.recv(65536)
        if not piece:
            break
        data += piece
    return data
