"""Request bodies that are large, or that would take long to parse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.api import bodies
from proxy.settings import Settings
from tests.support import says, serving, user

PATHS = [
    "/s/v1/chat/completions",
    "/s/v1/messages",
    "/s/v1/responses",
    "/s/v1/completions",
    "/s/v1/messages/count_tokens",
    "/s/v1/responses/input_tokens",
    "/s/v1/generate",
    "/s/v1/tokenize",
    "/s/v1/detokenize",
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
    async with serving(tmp_path, says("hi"), max_body_values=100_000) as server:
        await server.ok("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]})  # the session exists
        parsed.clear()
        refused = await server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert "--max-body-values" in refused.text
    assert "100000 values" in refused.text
    assert parsed == []


async def test_what_large_agents_send_is_within_the_default_limit() -> None:
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
        assert await bodies.Bodies(Settings()).decode(sent) == body
