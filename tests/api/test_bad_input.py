"""No body makes the server fail: a wrong field gives 400 with its name, and the next good request works."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import zlib
from collections.abc import AsyncIterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.engine.create import model_folder
from proxy.engine.scripted.scripts import Reply, Script
from proxy.serving.server import serving as served
from proxy.settings import Settings
from tests.support import Server, function_tool, sampled, serving, user

CHAT = "/s/v1/chat/completions"
GOOD = {"model": "m", "messages": [user("hi")]}
VALUES: list[Any] = [
    *("text", "", 0, 1, -1, 2.5, -0.5, 1e300, 10**30, -(10**30), 2**63, True, False),
    *([], [1], ["a"], [None], [[]], [{}], {}, {"a": 1}, {"type": 5}, {"type": "function"}, "x" * 3000),
]
# The indexes of VALUES that each field accepts; None: the field is ignored and accepts all.
TAKES: dict[str, list[Any] | None] = {
    "model": ["text", "", "x" * 3000],
    "messages": [],
    "stream": [True, False],
    "stream_options": [{}, {"a": 1}, {"type": 5}, {"type": "function"}],
    "tools": [[]],
    "tool_choice": [],
    "parallel_tool_calls": [True, False],
    "stop": ["text", "x" * 3000, [], ["a"]],
    "n": [1],
    "max_tokens": [1],
    "max_completion_tokens": [1],
    "temperature": [0, 1, 2.5],
    "top_p": [0, 1],
    "top_k": [0, 1, -1],
    "min_p": [0, 1],
    "seed": [0, 1, -1],
    "logit_bias": [{}],
    "presence_penalty": [0, 1, -1, -0.5],
    "frequency_penalty": [0, 1, -1, -0.5],
    "repetition_penalty": [1, 2.5],
    "reasoning_effort": ["text", "", "x" * 3000],
    "chat_template_kwargs": [{}, {"a": 1}, {"type": 5}, {"type": "function"}],
    "logprobs": [True, False],
    "return_token_ids": [True, False],
    "return_tokens_as_token_ids": [True, False],
    "stop_token_ids": [[], [1]],
    "min_tokens": [0, 1],
    "top_logprobs": [0],
    "response_format": [],
    "modalities": [[], [1], ["a"], [None], [[]], [{}]],
    "audio": [False, "", 0, [], {}],
    "functions": [False, "", 0, [], {}],
    "function_call": [False, "", 0, [], {}],
    "web_search_options": [False, "", 0, [], {}],
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")),
    **dict.fromkeys(("prediction", "verbosity", "moderation", "prompt_cache_retention", "never_heard_of")),
}


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


def same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def chat_path(session: str) -> str:
    return f"/{session}/v1/chat/completions"


async def still_works(server: Server, session: str) -> None:
    assert (await server.post(chat_path(session), GOOD)).status_code == 200


on_the_shared_app = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serving(tmp_path_factory.mktemp("shared"), always()) as server:
        yield server


@pytest.fixture
def server(shared_app: Server) -> Server:
    """The app of this module, which has forgotten the engine requests of other tests."""
    shared_app.engine.requests.clear()
    return shared_app


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A session of the test's own."""
    return f"s{zlib.crc32(request.node.nodeid.encode())}"


@pytest.mark.parametrize("field", TAKES)
@on_the_shared_app
async def test_each_field_accepts_its_values_and_is_named_for_others(server: Server, session: str, field: str) -> None:
    takes = TAKES[field]
    for value in VALUES:
        response = await server.post(chat_path(session), {**GOOD, field: value})
        good = takes is None or any(same(value, taken) for taken in takes)
        assert response.status_code == (200 if good else 400), (value, response.text)
        if not good:
            assert str(response.json()["error"]["param"]).startswith(field), (value, response.text)
    expected = 400 if field == "messages" else 200
    assert (await server.post(chat_path(session), {**GOOD, field: None})).status_code == expected
    await still_works(server, session)


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ([5], "messages[0]"),
    ([None], "messages[0]"),
    (["hi"], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "critic", "content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": None, "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([user("a"), {"role": "user", "content": 5}], "messages[1].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": True}], "messages[0].content"),
    ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": {}}]}], "messages[0].content[0].type"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    ([{"role": "assistant", "tool_calls": [{"id": 0, "function": {"name": "f"}}]}], "messages[0].tool_calls[0].id"),
    ([{"role": "assistant", "content": "x", "refusal": 5}], "messages[0].refusal"),
    ([{"role": "tool", "tool_call_id": 5, "content": "x"}], "messages[0].tool_call_id"),
    ([{"role": "tool", "tool_call_id": "c", "name": [], "content": "x"}], "messages[0].name"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
@on_the_shared_app
async def test_a_bad_message_is_named_by_its_path(server: Server, session: str, messages: Any, param: str) -> None:
    response = await server.post(chat_path(session), {"model": "m", "messages": messages})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    await still_works(server, session)


TOOL = function_tool("f")
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 129}, "n"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, {"type": 5}]}, "tools[1].type"),
    ({"tools": [{"function": {"name": "f", "description": 0}}]}, "tools[0].function.description"),
    ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"model": "a\0b"}, "model"),
    ({"chat_template_kwargs": False}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS)
@on_the_shared_app
async def test_unsupported_requests_are_refused_by_name(
    server: Server, session: str, fields: dict[str, Any], param: str
) -> None:
    response = await server.post(chat_path(session), {**GOOD, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert server.engine.requests == []
    await still_works(server, session)


@pytest.mark.parametrize(
    "name",
    ["messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template", "return_dict", "self"],
)
async def test_template_options_cannot_replace_the_conversation(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, always()) as server:
        for value in ("x", [], True, None, {"a": []}):
            response = await server.post(CHAT, {**GOOD, "chat_template_kwargs": {name: value}})
            assert response.status_code in (200, 400), response.text
        await server.post(CHAT, GOOD)
        *_, last = server.prompts()
    (tmp_path / "plain").mkdir()
    async with serving(tmp_path / "plain", always()) as server:
        await server.post(CHAT, GOOD)
        assert server.prompts() == [last]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"\xff\xfe",
        b'"\xff"',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xc3\x28"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\udc00x"}]}',
        b'{"model": "m", "messages": [], "temperature": NaN}',
        b'{"model": "m", "messages": [], "temperature": Infinity}',
        b'{"model": "m", "messages": [], "temperature": -Infinity}',
        b'{"model": "m", "messages": [], "temperature": 1e999}',
        b"{'model': 'm'}",
        b'{"model": "m",}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b'"x"',
        b"5",
        b"null",
        b"true",
    ],
    ids=lambda body: repr(body[:24]),
)
@on_the_shared_app
async def test_a_body_that_is_no_json_object_is_400(server: Server, session: str, body: bytes) -> None:
    for path in (chat_path(session), "/rl/start_session", "/export_trajectories"):
        if path != chat_path(session) and not body:
            continue  # these endpoints read an empty body as an empty object
        response = await server.http.post(path, content=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "body"
    await still_works(server, session)


@pytest.mark.parametrize("depth", [100, 240, 300, 500, 900, 1000])
@on_the_shared_app
async def test_deep_nesting_never_breaks_the_server(server: Server, session: str, depth: int) -> None:
    nested: Any = 1
    for _ in range(depth):
        nested = {"a": nested}
    text = json.dumps(nested) if depth < 900 else '{"a":' * depth + "1" + "}" * depth
    called = {"id": "c", "function": {"name": "f", "arguments": text}}
    bodies = [
        {**GOOD, "metadata": nested},
        {**GOOD, "chat_template_kwargs": {"a": nested}},
        {**GOOD, "tools": [{"function": {"name": "f", "parameters": nested}}]},
        {**GOOD, "messages": [user("x"), {"role": "assistant", "tool_calls": [called]}, user("y")]},
    ]
    for body in bodies:
        response = await server.http.post(chat_path(session), content=deep_json(body))
        assert response.status_code in (200, 400), (depth, list(body), response.text)
    await still_works(server, session)


def deep_json(body: Any) -> str:
    """JSON text nested deeper than Python's recursion limit."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(body)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "\uffff", "😀" * 100, "\u202e", "\r\n", "<|im_end|>", "{{ x }}{% y %}", ""]
)
@on_the_shared_app
async def test_any_text_may_be_content(server: Server, session: str, text: str) -> None:
    for content in (text, [{"type": "text", "text": text}]):
        await server.chat([{"role": "system", "content": content}, {"role": "user", "content": content}], session)
    tree = await server.tree(session)
    assert all(node["status"] == "complete" for node in tree)


@on_the_shared_app
async def test_dropped_tools_and_unknown_fields_are_recorded(server: Server, session: str) -> None:
    tools = [TOOL, {"type": "web_search"}]
    await server.chat([user("hi")], session, tools=tools, store=True, unheard_of={"a": 1})
    (node,) = await server.tree(session)
    assert node["notes"]["dropped"] == ["store", "unheard_of", "tools[1] of type web_search"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PART = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image_url", 5]), "text": JSON})
CALL = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "type": JSON,
        "function": JSON | st.fixed_dictionaries({"name": st.text(max_size=3)}, optional={"arguments": JSON}),
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x", None])},
    optional={
        "content": JSON | st.text(max_size=9) | st.lists(PART, max_size=2),
        "tool_calls": JSON | st.lists(CALL, max_size=2),
        "function_call": JSON | st.fixed_dictionaries({"name": st.text(max_size=3)}, optional={"arguments": JSON}),
        "tool_call_id": JSON,
        "name": JSON,
        "refusal": JSON,
        "reasoning_content": JSON,
        "reasoning_details": JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(MESSAGE | JSON, max_size=4)},
    optional={field: JSON for field in TAKES if field not in ("model", "messages", "stream")},
)


@on_the_shared_app
@pytest.mark.wide
async def test_no_body_at_all_gives_a_5xx(server: Server, session: str) -> None:
    loop = asyncio.get_running_loop()

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(body=BODY)
    def search(body: Any) -> None:
        sent = json.dumps(body)
        response = asyncio.run_coroutine_threadsafe(server.http.post(chat_path(session), content=sent), loop).result(30)
        assert response.status_code in (200, 400), (sent, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["param"], (sent, response.text)

    await asyncio.to_thread(search)
    await still_works(server, session)


async def test_a_body_beyond_the_limit_is_413_and_one_within_it_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), max_body_bytes=2000) as server:
        fits = json.dumps({**GOOD, "user": ""})
        fits = json.dumps({**GOOD, "user": "x" * (2000 - len(fits))})
        assert len(fits) == 2000
        assert (await server.http.post(CHAT, content=fits)).status_code == 200

        async def chunks() -> Any:
            for _ in range(3):
                yield b" " * 1000

        for content in (fits + " ", chunks()):
            for path in (CHAT, "/rl/start_session", "/export_trajectories"):
                response = await server.http.post(path, content=content)
                assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
                content = fits + " "


def test_a_hundred_megabytes_are_refused_without_being_read(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'test.db'}"
    configured = Settings(port=0, engine="scripted", database_url=database, tokenizer=str(model_folder(Settings())))
    with served(configured) as url:
        address = urlsplit(url)
        for framing in ("content-length: 104857600", "transfer-encoding: chunked"):
            with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
                head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
                connection.sendall(head.encode())
                sent = 0
                if "chunked" in framing:
                    sent = send_until_refused(connection)
                with HTTPResponse(connection) as answer:  # head and body may arrive apart
                    answer.begin()
                    assert (answer.status, b"body_too_large" in answer.read()) == (413, True)
                assert sent < 80 * 1024 * 1024
        assert httpx.post(url + CHAT, json=GOOD).status_code == 200


def send_until_refused(connection: socket.socket) -> int:
    """Send chunks until the server answers; return the number of bytes that it read."""
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    sent = 0
    while sent < 100 * 1024 * 1024:
        if select.select([connection], [], [], 0)[0]:
            return sent
        connection.sendall(piece)
        sent += 0x100000
    return sent
