"""Whatever parses what a client sends may get it of any depth, through the socket: it takes it, or refuses it by name.

Python ends a recursion of about a thousand calls. Nothing of a server may recurse as deep as its input.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import JSON, assistant, function_tool, real_server, user

DEPTHS = [200, 1000, 30_000]
CHAT, RESPONSES, MESSAGES = "/s/v1/chat/completions", "/s/v1/responses", "/s/v1/messages"
BODY: dict[str, Any] = {"model": "m", "messages": [user("hi")], "max_tokens": 2}
TOOL = {"type": "function", "name": "f"}


def arrays(depth: int) -> str:
    return "[" * depth + "]" * depth


def objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def schemas(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def choices(depth: int) -> str:
    return '{"anyOf":[' * depth + "{}" + "]}" * depth


def constants(depth: int) -> str:
    return f'{{"enum":[{arrays(depth)}]}}'


def patterns(depth: int) -> str:
    return json.dumps({"type": "string", "pattern": "(" * depth + "a" + ")" * depth})


def references(depth: int) -> str:
    """Definitions of which each names the next, and the last the first."""
    named = {f"d{number}": {"$ref": f"#/$defs/d{(number + 1) % depth}"} for number in range(depth)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": named})


def branches(depth: int) -> str:
    """A schema that names itself in many places: the number of paths grows with each level."""
    return json.dumps({"type": "object", "properties": {f"p{number}": {"$ref": "#"} for number in range(40)}})


def quoted(depth: int) -> str:
    """JSON in a string."""
    return json.dumps(objects(depth))


def calls(depth: int) -> str:
    """Tool calls as a model writes them, inside of each other."""
    return json.dumps("<tool_call>" * depth + arrays(depth) + "</tool_call>" * depth)


def template(depth: int) -> str:
    return json.dumps("{% if x %}" * depth + "{{ " + "(" * depth + "1" + ")" * depth + " }}" + "{% endif %}" * depth)


SCHEMAS = [schemas, choices, constants, patterns, references, branches, arrays, objects]
VALUES = [arrays, objects, quoted, calls, template]


def schema_of(kind: str) -> dict[str, Any]:
    return {"type": "json_schema", "name": kind, "schema": "HERE"}


PLACES: dict[str, tuple[str, Any]] = {
    "body": (CHAT, "HERE"),
    "message": (CHAT, {**BODY, "messages": ["HERE"]}),
    "content": (CHAT, {**BODY, "messages": [{"role": "user", "content": "HERE"}]}),
    "role": (CHAT, {**BODY, "messages": [{"role": "HERE", "content": "x"}]}),
    "part": (CHAT, {**BODY, "messages": [{"role": "user", "content": [{"type": "HERE", "text": "x"}]}]}),
    "answer": (CHAT, {**BODY, "messages": [user("x"), {"role": "assistant", "content": "HERE"}, user("y")]}),
    "arguments": (
        CHAT,
        {
            **BODY,
            "messages": [
                user("x"),
                assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "HERE"}}]),
                user("y"),
            ],
        },
    ),
    "template options": (CHAT, {**BODY, "chat_template_kwargs": {"a": "HERE"}}),
    "chat template": (CHAT, {**BODY, "chat_template": "HERE"}),
    "metadata": (CHAT, {**BODY, "metadata": {"a": "HERE"}}),
    "unknown field": (CHAT, {**BODY, "a": "HERE"}),
    "tool choice": (CHAT, {**BODY, "tools": [function_tool("f")], "tool_choice": "HERE"}),
    "input": (RESPONSES, {"model": "m", "max_output_tokens": 2, "input": "HERE"}),
    "item": (RESPONSES, {"model": "m", "max_output_tokens": 2, "input": [{"type": "HERE"}]}),
    "called": (
        RESPONSES,
        {
            "model": "m",
            "max_output_tokens": 2,
            "input": [user("x"), {"type": "function_call", "call_id": "c", "name": "f", "arguments": "HERE"}],
        },
    ),
    "namespace": (RESPONSES, {"model": "m", "input": "x", "tools": ["HERE"], "max_output_tokens": 2}),
    "tool input": (
        MESSAGES,
        {
            **BODY,
            "messages": [
                user("x"),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "HERE"}]},
                user("y"),
            ],
        },
    ),
    "result": (
        MESSAGES,
        {**BODY, "messages": [{"role": "user", "content": [{"type": "tool_result", "content": "HERE"}]}]},
    ),
    "system": (MESSAGES, {**BODY, "system": "HERE"}),
    "user id": (MESSAGES, {**BODY, "metadata": {"user_id": "HERE"}}),
    "session metadata": ("/rl/start_session", {"metadata": {"a": "HERE"}}),
    "session sampling": ("/rl/start_session", {"sampling": "HERE"}),
    "filter": ("/trajectories/export", {"filter": {"metadata": {"a": "HERE"}}}),
    "range": ("/trajectories/export", {"filter": {"metrics": {"a": {"min": "HERE"}}}}),
    "claim": ("/trajectories/claim", {"export": "HERE"}),
    "tokenized": ("/tokenize", {"messages": [user("x")], "chat_template_kwargs": {"a": "HERE"}}),
}
OF_SCHEMAS: dict[str, tuple[str, Any]] = {
    "chat tool": (CHAT, {**BODY, "tools": [function_tool("f") | {"function": {"name": "f", "parameters": "HERE"}}]}),
    "strict tool": (
        CHAT,
        {
            **BODY,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": "HERE", "strict": True}}],
            "tool_choice": "required",
        },
    ),
    "chat format": (CHAT, {**BODY, "response_format": {"type": "json_schema", "json_schema": schema_of("x")}}),
    "responses tool": (
        RESPONSES,
        {"model": "m", "max_output_tokens": 2, "input": "x", "tools": [{**TOOL, "parameters": "HERE"}]},
    ),
    "responses format": (
        RESPONSES,
        {"model": "m", "max_output_tokens": 2, "input": "x", "text": {"format": schema_of("x")}},
    ),
    "messages tool": (MESSAGES, {**BODY, "tools": [{"name": "f", "input_schema": "HERE"}]}),
    "messages tool of a type": (MESSAGES, {**BODY, "tools": [{"type": "HERE", "name": "f"}]}),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("deep")
    with real_server(folder, engine="scripted") as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def taken_or_refused(response: httpx.Response) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text[:2000]
    if response.status_code == 400:
        error = response.json()["error"]
        assert "param" not in error or error["param"] is not None, response.text[:2000]


def posted(client: httpx.Client, path: str, body: Any, text: str) -> httpx.Response:
    return client.post(path, content=json.dumps(body).replace('"HERE"', text).encode(), headers=JSON)


def still_works(client: httpx.Client) -> None:
    assert client.post("/after" + CHAT.removeprefix("/s"), json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("place", "kinds"), [*((each, VALUES) for each in PLACES), *((each, SCHEMAS) for each in OF_SCHEMAS)]
)
def test_a_body_may_be_of_any_depth_at_each_place(client: httpx.Client, place: str, kinds: list[Any]) -> None:
    path, body = {**PLACES, **OF_SCHEMAS}[place]
    for kind in kinds:
        for depth in DEPTHS:
            taken_or_refused(posted(client, path, body, kind(depth)))
    still_works(client)


HEADERS = [
    *("x-codex-turn-metadata", "authorization", "x-forwarded-for", "forwarded", "accept", "x-session-id", "cookie"),
    *("content-type", "accept-encoding", "range", "traceparent", "baggage", "idempotency-key", "origin", "host"),
]


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_may_be_of_any_depth(client: httpx.Client, name: str) -> None:
    for text in (
        arrays(10_000),
        objects(10_000),
        "(" * 30_000,
        "a=(" * 9000,
        "a," * 10_000,
        ";" * 30_000,
        '"' * 30_000,
    ):
        taken_or_refused(client.post(CHAT, content=json.dumps(BODY), headers={**JSON, name: text}))
    still_works(client)


@pytest.mark.parametrize(
    "url",
    [
        "/a" * 5000 + CHAT,
        "/rl/sessions/" + "a/" * 5000,
        "/" + "%2e%2e/" * 3000 + "v1/chat/completions",
        "/rl/sessions?filter=" + arrays(5000),
        "/rl/sessions?filter=" + objects(900).replace('"', "%22"),
        "/rl/sessions?" + "include=a&" * 3000,
        "/rl/sessions?" + "a[" * 5000,
        "/rl/sessions/s/interactions/0?include=" + "a.," * 5000,
    ],
    ids=lambda url: url[:24],
)
def test_a_url_may_be_of_any_depth(client: httpx.Client, url: str) -> None:
    posts = url.endswith("completions")
    taken_or_refused(client.post(url, json=BODY) if posts else client.get(url))
    still_works(client)
