"""`x-tokengrove-ignored` names the fields of a request that changed nothing, in every API, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from proxy.engine.scripted.scripts import Reply, Script
from tests.support import function_tool, sampled, serving, user
from tests.wide import CROSSED

HEADER = "x-tokengrove-ignored"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": [user("hi")], "user": "u", "typical_p": 0.5}, "typical_p,user"),
    (
        "chat/completions",
        {"messages": [user("hi")], "tools": [function_tool("f"), {"type": "web_search"}]},
        "tools[1] of type web_search",
    ),
    ("responses", {"input": "hi", "user": "u", "length_penalty": 1.2}, "length_penalty,user"),
    ("responses", {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
    ("responses", {"input": "hi", "text": {"format": {"type": "text"}, "verbosity": "low"}}, "text.verbosity"),
    ("responses", {"input": "hi", "truncation": "auto"}, "truncation"),
    (
        "messages",
        {"messages": [user("hi")], "max_tokens": 9, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0] of type web_search_20250305",
    ),
    (
        "messages",
        {"messages": [user("hi")], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}, "speed": "x"},
        "speed,thinking.budget_tokens",
    ),
]


HOSTED = [case for case in CASES if case[2].startswith("tools[")]


def always() -> Script:
    reply = Reply(sampled("ok"))
    return lambda _: reply


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "expected"), CASES)
async def test_ignored_fields_are_named(
    tmp_path: Path, path: str, body: dict[str, Any], expected: str, stream: bool
) -> None:
    async with serving(tmp_path, always()) as server:
        response = await server.post(f"/s/v1/{path}", {"model": "m", **body, "stream": stream})
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == expected
        (node,) = await server.tree()
        assert node["notes"]["dropped"] == expected.split(",")


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "expected"), HOSTED)
async def test_a_server_can_refuse_tools_that_only_a_provider_runs(
    tmp_path: Path, path: str, body: dict[str, Any], expected: str, stream: bool
) -> None:
    async with serving(tmp_path, always(), hosted_tools="refuse") as server:
        response = await server.post(f"/s/v1/{path}", {"model": "m", **body, "stream": stream})
        assert response.status_code == 400 and server.engine.requests == []
        named, _, kind = expected.partition(" of type ")
        error = response.json()["error"]
        assert f"'{named}' has type '{kind}'" in error["message"] and "--hosted-tools" in error["message"]
        assert (await server.post(f"/s/v1/{path}", {"model": "m", **body, "tools": []})).status_code == 200


GOOGLE = {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"googleSearch": {}}]}
SEARCH = {"input": "hi", "tools": [{"type": "web_search"}]}
COUNTED = [
    ("tokenize", "chat/completions", *HOSTED[0][1:]),
    ("messages/count_tokens", "messages", *HOSTED[1][1:]),
    ("responses/input_tokens", "responses", SEARCH, "tools[0] of type web_search"),
    ("models/m:countTokens", "models/m:generateContent", GOOGLE, "tools[0] of type googleSearch"),
]


@CROSSED
@pytest.mark.parametrize("session", ["/s", ""])
@pytest.mark.parametrize(("path", "turn", "body", "expected"), COUNTED)
async def test_counting_refuses_hosted_tools_with_the_error_of_a_turn(
    tmp_path: Path, path: str, turn: str, body: dict[str, Any], expected: str, session: str
) -> None:
    async with serving(tmp_path, always(), hosted_tools="refuse") as server:
        of_turn = await server.post(f"/s/v1/{turn}", {"model": "m", **body})
        counted = await server.post(f"{session}/v1/{path}", {"model": "m", **body})
        assert (counted.status_code, counted.json()["error"]) == (400, of_turn.json()["error"])
        assert f"'{expected.partition(' of type ')[0]}'" in counted.text
        assert (await server.post(f"{session}/v1/{path}", {"model": "m", **body, "tools": []})).status_code == 200
    async with serving(tmp_path, always()) as server:
        assert (await server.post(f"{session}/v1/{path}", {"model": "m", **body})).status_code == 200


@pytest.mark.parametrize("path", ["/s/v1/generate", "/v1/generate"])
async def test_generate_names_ignored_fields_with_and_without_a_session(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, always()) as server:
        params = {"max_new_tokens": 4, "min_tokens": 0, "no_stop_trim": True}
        body = {"input_ids": [1], "request_id": "r", "return_logprob": True, "stream": False, "sampling_params": params}
        response = await server.post(path, body)
        assert response.headers[HEADER] == "return_logprob,sampling_params.no_stop_trim"


async def test_a_null_is_no_ignored_field(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        body = {"model": "m", "messages": [user("hi")], "user": None, "unheard_of": None}
        response = await server.post("/s/v1/chat/completions", body)
        assert HEADER not in response.headers


async def test_any_name_fits_into_the_header(tmp_path: Path) -> None:
    names = ["a,b", "ein ä", "line\r\nx-evil: 1", "\ud800", "\0"]
    async with serving(tmp_path, always()) as server:
        fields = ",".join(f'"{name}": 1' for name in ("a,b", "ein ä", "line\\r\\nx-evil: 1", "\\u0000"))
        body = f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], {fields}}}'
        response = await server.http.post("/s/v1/chat/completions", content=body.encode())
        assert response.status_code == 200, response.text
        shown = [unquote(name) for name in response.headers[HEADER].split(",")]
        assert sorted(shown) == sorted(name for name in names if name != "\ud800")
        assert "x-evil" not in response.headers


async def test_very_many_names_are_cut(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        body = {"model": "m", "messages": [user("hi")], **{f"field_{number:05}": 1 for number in range(5000)}}
        names = (await server.post("/s/v1/chat/completions", body)).headers[HEADER].split(",")
        assert names[:2] == ["field_00000", "field_00001"] and names[-1] == "..."
        assert len(",".join(names)) <= 1100
        response = await server.post("/s/v1/chat/completions", {**BODY, "x" * 100_000: 1})
        assert len(response.headers[HEADER]) <= 1100


BODY = {"model": "m", "messages": [user("hi")]}


async def test_the_notes_of_a_turn_keep_no_long_type_whole(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": "f" * 100_000}] * 2
    async with serving(tmp_path, always()) as server:
        body = {"model": "m", "input": "hi", "tools": tools, "y" * 50_000: 1}
        response = await server.post("/s/v1/responses", body)
        assert response.status_code == 200 and len(response.headers[HEADER]) < 8000
        (node,) = await server.tree()
        short, other = sorted(node["notes"]["dropped"])
        assert short.startswith("tools[1] with a name already in use: fff") and other.startswith("yyy")
        assert len(short) <= 300 and len(other) <= 300 and "characters left out" in short
