"""Request bodies that are large, or that would take long to parse."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

from proxy import parsed_items
from proxy.api import bodies
from proxy.resources.memory import FreedMemory
from proxy.settings import Settings
from tests.support import says, serving, user
from tests.wide import CROSSED

PATHS = [
    "/s/v1/chat/completions",
    "/s/v1/messages",
    "/s/v1/responses",
    "/s/v1/completions",
    "/s/v1/messages/count_tokens",
    "/s/v1/responses/input_tokens",
    *(f"/s/v1beta/models/m:{method}" for method in ("generateContent", "streamGenerateContent", "countTokens")),
    "/s/v1/generate",
    "/s/v1/tokenize",
    "/s/v1/detokenize",
    "/s/v1/parse",
    "/rl/start_session",
    "/s/rl/set_reward",
    "/s/rl/end_session",
    "/s/rl/rotate_keys",
    "/trajectories/export",
    "/trajectories/claim",
    "/engine/update_weights",
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_of_too_many_values_is_refused_by_name_before_it_is_parsed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"messages": [' + b"[]," * 40_000 + b"[]]}"
    parsed: list[int] = []
    decode = bodies.decode_json

    def watched(text: bytes) -> Any:
        parsed.append(len(text))
        return decode(text)

    monkeypatch.setattr(bodies, "decode_json", watched)
    monkeypatch.setattr(bodies, "INLINE", 10_000)
    monkeypatch.setattr(bodies, "INLINE_WORK", 10_000)
    async with serving(tmp_path, says("hi"), max_body_values=100_000) as server:
        await server.ok("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]})  # the session exists
        parsed.clear()
        refused = await server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert "--max-body-values" in refused.text
    assert "100000 values" in refused.text
    assert parsed == []


def test_what_large_agents_send_is_within_the_default_limit() -> None:
    text = 'if x[0] == {"a": [1, 2]}: print(f"{x}, {y}")\n' * 20
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2, {"b": 3}]}'}}]
    echo: list[dict[str, Any]] = [user("go")]
    for _ in range(1000):
        echo.append({"role": "assistant", "content": None, "tool_calls": calls})
        echo.append({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": text}]})
    properties = {f"p{number}": {"type": "string", "description": "d"} for number in range(20)}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(200)]
    for body in ({"messages": echo, "tools": tools}, {"input_ids": list(range(1_048_576))}):
        sent = orjson.dumps(body)
        assert len(sent) > bodies.INLINE
        assert bodies.Bodies(Settings(), FreedMemory()).decode(sent) == body


LONG_TEXT = "many words " * 60_000
OF_A_CHAT = {"model": "m", "max_tokens": 5, "messages": [user(LONG_TEXT)]}
OF_A_TOOL = {"type": "function", "function": {"name": "f", "description": LONG_TEXT, "parameters": {}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/s/v1/chat/completions", OF_A_CHAT),
        ("/s/v1/chat/completions", {"messages": [user("hi")], "tools": [OF_A_TOOL]}),
        ("/s/v1/messages", OF_A_CHAT),
        ("/s/v1/responses", {"model": "m", "input": LONG_TEXT}),
        ("/s/v1/completions", {"model": "m", "prompt": LONG_TEXT}),
        ("/s/v1/generate", {"input_ids": [5] * 200_000}),
        ("/s/v1/messages/count_tokens", OF_A_CHAT),
        ("/s/v1/responses/input_tokens", {"model": "m", "input": LONG_TEXT}),
        ("/s/v1/tokenize", {"prompt": LONG_TEXT}),
        ("/s/v1/tokenize", {"messages": [user(LONG_TEXT)]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_text_far_above_the_context_is_refused_before_it_is_encoded(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says("hi", "ho"), max_context_tokens=2000) as server:
        tokenizer = server.app.state.renderer._tokenizer
        encode, encoded = tokenizer._encode, list[int]()

        def watched(text: str) -> Any:
            encoded.append(len(text))
            return encode(text)

        monkeypatch.setattr(tokenizer, "_encode", watched)
        refused = await server.post(path, body)
        assert refused.status_code == 400, refused.text
        told = re.search(
            r"(\d+) tokens > 2000 maximum|length is 2000 tokens.* resulted in [a-z ]*(\d+) tokens", refused.text
        )
        assert told is not None, refused.text
        assert int(told[1] or told[2]) > 2000
        assert max(encoded, default=0) < 1000
        await server.ok("/s/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 5})  # nothing was recorded
        assert [node["reason"] for node in await server.tree()] == ["first"]


async def test_a_prompt_above_the_context_is_counted_all_the_same(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [user("many words " * 1000)], "max_tokens": 5}
    async with serving(tmp_path, says("hi"), max_context_tokens=2000) as server:
        counted = (await server.ok("/s/v1/messages/count_tokens", body))["input_tokens"]
        assert counted > 2000
        refused = await server.post("/s/v1/messages", body)
        assert f"{counted} tokens > 2000" in refused.text


async def test_a_session_that_ends_quietly_at_the_context_does_so_up_to_four_times_its_length(tmp_path: Path) -> None:
    limits = {"on_context_overflow": "length"}
    async with serving(tmp_path, says("hi"), max_context_tokens=20_000) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "limits": limits})
        reply = await server.chat([user("many words " * 20_000)], max_tokens=5)
        assert reply["choices"][0]["finish_reason"] == "length"
        refused = await server.post("/s/v1/chat/completions", OF_A_CHAT)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@CROSSED
@pytest.mark.parametrize("path", ["/s/v1/messages", "/s/v1/messages/count_tokens", "/s/v1/chat/completions"])
@pytest.mark.parametrize("messages", [1, 100])
async def test_a_session_keeps_nothing_of_what_was_refused(
    path: str, messages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsed_items, "_MOST_BYTES", 100_000)
    async with serving(tmp_path, says("hi"), max_context_tokens=2000) as server:
        await server.chat([user("hi")], max_tokens=5)
        session = await server.app.state.registry.get("s")
        for number in range(3):
            text = f"{number} {LONG_TEXT[: len(LONG_TEXT) // messages]}"
            body = {"model": "m", "max_tokens": 5, "messages": [user(text)] * messages}
            assert (await server.post(path, body)).status_code == 400
    assert [len(kept.messages) for kept in session.cache.recent.kept] == [1]
    assert [items._kept for items in session.parsed.values() if items._kept] == []


@pytest.mark.parametrize("path", ["/s/v1/messages", "/s/v1/messages/count_tokens", "/s/v1/responses/input_tokens"])
async def test_what_was_refused_is_freed_at_once_and_not_by_the_garbage_collection(path: str, tmp_path: Path) -> None:
    async with serving(tmp_path, says("hi"), max_context_tokens=2000) as server:
        body = {**OF_A_CHAT, "input": LONG_TEXT}
        await server.post(path, body)  # makes what is made once
        gc.collect()
        try:
            gc.disable()
            assert (await server.post(path, body)).status_code == 400
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [str(value) for value in gc.garbage if isinstance(value, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []
