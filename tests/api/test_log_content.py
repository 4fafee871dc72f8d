"""No line has text of messages, wherever a request has it, unless `--log-content` is set; nor keys and secrets."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import SQLAlchemyError

from proxy.api import request_lines
from proxy.engine.scripted.scripts import Reply
from proxy.store.database import parse_url, writer_engine
from proxy.telemetry.log_lines import without_texts
from tests.logs import fields_of, lines_of
from tests.support import Server, sampled, says, serving, user

MARK = "MARKED text"
ANSWER = "SAMPLED text"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be"},
        user("hi"),
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "stop": ["x"],
    "metadata": {"a": "b"},
    "response_format": {"type": "text"},
    "logit_bias": {"1": 1},
}
RESPONSES: dict[str, Any] = {
    "instructions": "be",
    "input": [
        user("hi"),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "text": {"format": {"type": "text"}},
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be"}],
    "messages": [
        user("hi"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "o"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "stop_sequences": ["x"],
    "tool_choice": {"type": "auto"},
}
BODIES = {
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "messages/count_tokens": MESSAGES,
    "completions": {"prompt": "hi", "stop": "x"},
    "tokenize": {"prompt": "hi"},
    "generate": {"input_ids": [1], "sampling_params": {"stop": "x", "max_new_tokens": 3}},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each part of a body."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A body with another part at a path."""
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(changed[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("'messages[0].role' is 'user'", "'messages[0].role' is 'user'"),
        ("'a.b' is 'two words'; the server's log isn't 'x'", "'a.b' is '...'; the server's log isn't 'x'"),
        (f"it is {'it is a' + chr(39)!r}", 'it is "..."'),
        ("it is {!r} or {!r}".format("a'b\"c d", "line\nend"), "it is '...' or '...'"),
        ("it is " + repr("w" * 61), "it is '...'"),
        ("it is b'sampled text'", "it is '...'"),
        ("it is 'cut off in the mid", "it is '...'"),
        ('it is "a' + 40_000 * '\\"' + "\\", 'it is "..."'),
    ],
)
def test_what_an_error_quotes_is_left_out_unless_it_is_a_word(message: str, told: str) -> None:
    assert without_texts(message) == told


@pytest.mark.parametrize("path", BODIES)
async def test_no_line_has_text_of_a_request_wherever_it_stands(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_lines, "REFUSALS", 10_000)
    caplog.set_level(logging.DEBUG, "proxy")
    async with serving(tmp_path, lambda _: Reply(sampled(ANSWER))) as server:
        statuses = set()
        for place in places(BODIES[path]):
            for mark in (MARK, {"type": MARK}):
                response = await server.post(f"/s/v1/{path}", put(BODIES[path], place, mark))
                statuses.add(response.status_code)
        text = "\n".join(lines_of(caplog) + lines_of(caplog, form="json"))
        assert "MARKED" not in text and "SAMPLED" not in text
        assert 400 in statuses and {name for name in ("turn", "request", "refused") if fields_of(caplog, name)}


async def test_with_log_content_the_beginning_of_each_turn_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "proxy")
    async with serving(tmp_path, says(ANSWER), log_content=True, log_level="debug") as server:
        await server.chat([user("long " * 1000)])
        (content,) = fields_of(caplog, "content")
        assert content["messages"].startswith("user: long long") and content["answer"] == ANSWER
        assert all(len(line) < 1000 for line in lines_of(caplog))


async def everything(server: Server) -> None:
    """Call all routes with each key and none, with a secret in the path, and with the login of a server."""
    admin = {"authorization": "Bearer the-ADMIN-key"}
    started = await server.ok("/rl/start_session", {"session_id": "s", "task_id": "t"}, headers=admin)
    secret = started["root_url"].removeprefix("http://t")
    for headers in (
        admin,
        {"x-api-key": started["api_key"]},
        {"authorization": f"Bearer {started['control_key']}"},
        {},
    ):
        for route in server.app.routes:
            if route.path == "/rl/events":  # type: ignore[attr-defined]
                continue  # its answer has no end
            for method in route.methods:  # type: ignore[attr-defined]
                path = route.path.replace("/{session:path}", secret).replace("{model:path}", "m")  # type: ignore[attr-defined]
                if "delete" not in method.lower():
                    await server.http.request(method, path, headers=headers, json={"url": "http://u:PASSWORD@h:1"})


async def test_no_line_has_a_key_or_a_secret_of_a_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(tmp_path, says(), admin_key="the-ADMIN-key") as server:
        issued: list[str] = []
        server.http.event_hooks["response"] = [lambda response: _keys(response, issued)]
        await everything(server)
    own = lines_of(caplog, logger="proxy") + lines_of(caplog, logger="tokengrove")
    assert len(own) > 100 and len(issued) > 2
    for secret in (*issued, "ADMIN", "PASSWORD"):
        assert not [line for line in own if secret in line]


async def _keys(response: Any, issued: list[str]) -> None:
    """Collect the keys that an answer issues."""
    await response.aread()
    if "root_url" in response.text:
        answer = json.loads(response.text)
        keys = (answer["api_key"], answer["control_key"], answer["root_url"].rpartition("~")[2])
        issued += [key for key in keys if key]


def test_an_error_of_the_database_has_none_of_the_values(tmp_path: Path) -> None:
    with (
        writer_engine(parse_url(f"sqlite:///{tmp_path / 'a.db'}")).connect() as connection,
        pytest.raises(SQLAlchemyError) as refused,
    ):
        connection.exec_driver_sql("SELECT ?, nothing", (MARK,))
    assert "nothing" in str(refused.value) and MARK not in str(refused.value)
