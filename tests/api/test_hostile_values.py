"""Every field of every body, at every depth of it, may hold anything: a deep, long or odd value is taken or refused.

A refusal names its field, is no 5xx, and is small however much it quotes. The server then still works.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_hostile_input import BODIES, GOOGLE, always
from tests.support import JSON, Server, assistant, function_tool, serving, tool_result, user
from tests.wide import few

MOST_ERROR_BYTES = 4096
DEEP = {
    "arrays": "[" * 1000 + "]" * 1000,
    "objects": '{"type":' * 1000 + "1" + "}" * 1000,
    "less deep": '{"type":' * 250 + "[]" + "}" * 250,
}
LONG = {
    "long": json.dumps("x" * 100_000),
    "wide characters": json.dumps("😀" * 20_000, ensure_ascii=False),
    "controls": json.dumps("\x01" * 20_000),
    "quotes": json.dumps("'\"\\" * 10_000),
    "long key": json.dumps({"k" * 50_000: {"\x01" * 20_000: 1}}),
    "many": json.dumps([{"type": "x" * 50}] * 500),
    "many keys": json.dumps({f"key {number}": number for number in range(2000)}),
}
ODD = {
    "half a pair": '"\\ud83d"',
    "NUL": '"a\\u0000b"',
    "large": "1" + "0" * 300,
    "larger than 64 bits": "18446744073709551616",
    "float": "1e308",
    "null": "null",
    "false": "false",
    "nothing": '""',
    "empty": "[{}]",
}
VALUES = {**DEEP, **LONG, **ODD}

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
RICH_CHAT = {
    "model": "m",
    "max_tokens": 2,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "x"}]},
        user("x"),
        assistant("y", tool_calls=[CALL], reasoning_content="z", refusal=None),
        tool_result("c", "x"),
        {"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE], "name": "n"},
    ],
    "tools": [function_tool("f", {"a": {"type": "string", "pattern": "a+"}})],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "stream_options": {"include_usage": True},
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "min_p": 0.5,
    "regex": "a+",
    "modalities": ["text"],
}
RICH_RESPONSES = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "item_reference", "id": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "low"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "custom", "name": "g"}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "truncation": "auto",
    "include": ["x"],
    "conversation": {"id": "x"},
}
RICH_MESSAGES = {
    "model": "m",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "y"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
                {"type": "document", "source": {"type": "text", "data": "x"}},
            ],
        },
    ],
    "tools": [{"type": "custom", "name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}
RICH_GOOGLE = {
    **GOOGLE,
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": "AA"}}]},
        {
            "role": "model",
            "parts": [
                {"text": "x", "thought": True, "thoughtSignature": "eA=="},
                {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}},
            ],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"output": "x"}, "parts": []}}],
        },
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
}
RICH = {
    "/s/v1beta/models/m:generateContent": RICH_GOOGLE,
    "/s/v1/chat/completions": RICH_CHAT,
    "/s/v1/responses": RICH_RESPONSES,
    "/s/v1/messages": RICH_MESSAGES,
    "/tokenize": {**RICH_CHAT, "add_generation_prompt": True},
}
"""Bodies with a field of every kind that is parsed, which need not be taken as they are."""

GOOGLE_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
PATHS = {
    "/chat/completions": "/s/v1/chat/completions",
    "/responses": "/s/v1/responses",
    "/responses/input_tokens": "/s/v1/responses/input_tokens",
    "/messages": "/s/v1/messages",
    "/messages/count_tokens": "/s/v1/messages/count_tokens",
    "/generate": "/s/v1/generate",
    **{f":{method}": f"/s/v1beta/models/m:{method}" for method in GOOGLE_METHODS},
}
ROUTES = [*((PATHS.get(end, end), body) for end, body in BODIES.items()), *RICH.items()]


def places(value: Any) -> Iterator[Any]:
    """Copies of a value, each with a mark in place of one value in it."""
    yield "HERE"
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: changed} for changed in places(inner))
        yield {**value, "unknown": "HERE"}
        yield {**value, "NAME": 1}
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from ([*value[:number], changed, *value[number + 1 :]] for changed in places(inner))


def written(body: Any, text: str) -> str:
    """JSON of a body with `text` in place of its mark; a name is text, too."""
    name = text if text.startswith('"') else json.dumps(text[:50_000])
    return json.dumps(body).replace('"HERE"', text).replace('"NAME"', name)


async def sent(server: Server, path: str, content: str) -> None:
    """Send a body that is taken or refused by name, in few bytes."""
    response = await server.http.post(path, content=content.encode(), headers=JSON)
    told = (path, content[:300], response.text[:3000])
    assert response.status_code < 500 or response.status_code == 501, told
    if response.status_code >= 400:
        assert len(response.content) <= MOST_ERROR_BYTES, told
    if response.status_code == 400 and "/messages" not in path:
        error = response.json()["error"]
        assert error.get("param") is not None or error["details"][1]["fieldViolations"][0]["field"], told
    if path.startswith("/engine/"):
        for undone in ("/engine/resume_memory", "/engine/continue_generation"):  # else turns wait
            await server.http.post(undone)


@pytest.mark.parametrize("value", few(VALUES, (*list(DEEP)[:1], *list(LONG)[:1], *list(ODD)[:2])))
async def test_every_value_of_every_body_may_be_anything(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, always()) as server:
        with caplog.at_level(logging.WARNING):
            for path, body in ROUTES:
                for changed in places(body):
                    if changed != "HERE" and changed.get("wait_s") != "HERE":
                        await sent(server, path, written(changed, VALUES[value]))
        assert not [record.getMessage() for record in caplog.records if record.exc_info]
        await server.chat([user("hi")], "after")
