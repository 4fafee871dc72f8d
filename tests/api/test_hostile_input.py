"""No request makes the server fail: hostile headers, paths, queries and bodies on every route give an answer below 500.

They are drawn by seed; a body is a good one of its route with a part replaced. The server then still works.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.routing import Route

from proxy.app import build_app
from proxy.engine.interface import WeightTransfer
from proxy.engine.scripted.scripts import Reply, Script
from proxy.settings import Settings
from tests.engines.wire import LiveWire
from tests.mailboxes import posting
from tests.support import JSON, Server, assistant, default_url, function_tool, sampled, serving, tiny_renderer, user

NUL = "a\0b"
DIGITS = ["9" * 4301, "9" * 400, "-" + "9" * 4301, "1e999", "nan", "inf", "-0", "0x10", "²", "٣", "1_0", "", "+5", " 5"]
ADMIN = {"authorization": "Bearer admin"}
TEXTS = [
    *DIGITS,
    *(NUL, "\0", "\x7f", "é", "日本", "😀", "a" * 300, "a" * 70_000, "../x", ".", "..", "a/../../b", "~", "s~x", "%00"),
    *("'; DROP TABLE sessions; --", "%s%n", "{}", "[]", "null", "\r\nx: y", "\u202e", "\ufeff", "/", "//", "a b", "\\"),
]
JSON_TEXTS = [
    *('"\\u0000"', '"a\\u0000b"', '"\\ud800"', '{"\\u0000": 1}', '{"a\\u0000": "\\u0000"}', '"\\udfff\\ud800"'),
    *("1e400", "-1e400", "1" + "0" * 400, "18446744073709551616", "9223372036854775808", "-9223372036854775809"),
    *("2147483648", "1e308", "-0.0", "5e-324", "NaN", "Infinity", "null", "true", "[]", "{}", '""', "[null]", "[[]]"),
    *(
        '"' + "x" * 5000 + '"',
        '{"a": {"b": [1, "\\u0000"]}}',
        '"é"',
        '"a/../../b"',
        '".."',
        '[".."]',
        "0",
        "-1",
        "0.5e0x",
    ),
    *('{"min": 1e308}', '{"min": "\\u0000"}', '["\\u0000"]', "[1e308, -1e308]", "[18446744073709551615]"),
    *("[" * depth + "1" + "]" * depth for depth in (120, 246, 253, 254, 255, 900, 1020)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (120, 246, 253, 254, 255, 900, 1020)),
]
TOOLS = [function_tool("f", {"a": {"type": "string"}})]
CHAT = {"model": "m", "messages": [user("hi")], "max_tokens": 4, "metadata": {}, "user": "u", "stop": ["x"], "n": 1}
CHAT |= {"tools": TOOLS, "response_format": {"type": "json_object"}, "chat_template_kwargs": {}, "logit_bias": {"1": 1}}
CHAT |= {"stream": False, "seed": 1, "temperature": 1, "logprobs": True, "top_logprobs": 2, "stop_token_ids": [1]}
RESPONSES = {"model": "m", "input": [{"role": "user", "content": "hi"}], "instructions": "x", "metadata": {}}
RESPONSES |= {"previous_response_id": "x", "reasoning": {}, "text": {}, "tools": [{"type": "function", "name": "f"}]}
MESSAGES = {"model": "m", "max_tokens": 4, "messages": [user("hi")], "system": "x", "metadata": {"user_id": "{}"}}
MESSAGES |= {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "stop_sequences": ["x"], "thinking": {}}
GOOGLE: dict[str, Any] = {
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    "systemInstruction": {"parts": [{"text": "x"}]},
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {}}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {"maxOutputTokens": 4, "stopSequences": ["x"], "thinkingConfig": {"includeThoughts": True}},
}
GOOGLE["generationConfig"] |= {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}, "seed": 1}
FILTER = {"group_id": "g", "task_id": "t", "since": 1, "metadata": {"a": 1}, "metrics": {"m": {"min": 0}}, "agent": "a"}
EXPORT = {"session_id": "s", "filter": FILTER, "limit": 1, "cursor": "a", "reward_name": "r", "train": {"turns": [0]}}
EXPORT |= {"layout": "padded", "prompt_length": 8, "response_length": 8, "pad_token_id": 0, "include": ["text"]}
START = {"task_id": "t", "session_id": "new", "group_id": "g", "metadata": {"a": 1}, "sampling": {"temperature": 1}}
START |= {
    "limits": {"max_turns": 5, "deadline_s": 9},
    "discount": 1,
    "api_key": "k",
    "group_size": 2,
    "key_lifetime_s": 9,
}
REWARD = {"reward": 1, "interaction_id": "x", "turn": 0, "name": "n", "rewards": {"x": 1}, "step_scores": [1]}
DELIVERY = {"interaction_id": "x", "session_id": "s", "turn": 0, "text": "x", "output_ids": [1], "logprobs": [-1.0]}
DELIVERY |= {"message": {"content": "x", "tool_calls": []}, "response": {"choices": []}, "error": "x", "version": 1}
BODIES: dict[str, Any] = {
    "/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 2, "logprobs": 1, "echo": True, "stop": "x"},
    "/responses": RESPONSES,
    "/responses/input_tokens": RESPONSES,
    "/messages": MESSAGES,
    "/messages/count_tokens": MESSAGES,
    ":generateContent": GOOGLE,
    ":streamGenerateContent": GOOGLE,
    ":countTokens": {"generateContentRequest": GOOGLE},
    "/generate": {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "stop": ["x"]}, "request_id": "r"},
    "/tokenize": {"messages": [user("x")], "prompt": "x", "tools": TOOLS, "chat_template_kwargs": {}},
    "/v1/tokenize": {
        "messages": [user("x"), {"role": "assistant", "content": "y"}, user("z")],
        "continue_from": {"messages": 2, "token_ids": [1, 2, 3], "output_tokens": 1},
        "add_generation_prompt": False,
    },
    "/detokenize": {"tokens": [1, 2]},
    "/parse": {"tokens": [1], "tools": TOOLS, "tool_parser": "hermes", "reasoning_parser": "none", "prompt_ids": [1]},
    "/rl/start_session": START,
    "/rl/set_reward": REWARD,
    "/rl/end_session": {**REWARD, "outcome": "Finished", "exit_reason": "x", "metrics": {"a": 1}, "finished": True},
    "/rl/mark": {"interaction_id": "x", "turn": 0, "trainable": True, "spans": [[0, 1]]},
    "/rl/rotate_keys": {"keys": ["agent"], "key_lifetime_s": 9},
    "/grant_capacity": {"n": 1},
    "/trajectories/export": EXPORT,
    "/export_trajectories": EXPORT,
    "/trajectories/claim": {"claim_id": "c", "consumer": "x", "filter": FILTER, "limit": 1, "lease_s": 1, "export": {}},
    "/trajectories/acknowledge": {"claim_id": "c", "session_ids": ["s"]},
    "/engine/pause_generation": {"mode": "abort"},
    "/engine/update_weights": {"path": "/x", "version": 1, "mode": "abort"},
    "/engine/release_memory": {"tags": ["weights"], "mode": "abort"},
    "/engine/servers": {"url": "http://127.0.0.1:9"},
    "/mailbox/next": {"session_id": "s", "wait_s": 0},
    "/mailbox/deliver": DELIVERY,
}
CHAT_OF_ONE = {"model": "m", "messages": [user("hi")], "max_tokens": 2}
HEADERS = [
    *("authorization", "x-api-key", "x-session-id", "session-id", "x-claude-code-session-id", "x-parent-session-id"),
    *("x-stainless-retry-count", "idempotency-key", "x-tokengrove-state-hash", "x-tokengrove-agent", "accept"),
    *("x-tokengrove-purpose", "x-codex-turn-metadata", "x-openai-subagent", "x-claude-code-agent-id", "host", "origin"),
    *(
        "content-length",
        "content-type",
        "content-encoding",
        "expect",
        "range",
        "cookie",
        "x-forwarded-for",
        "forwarded",
    ),
    *("x-forwarded-host", "x-forwarded-proto", "x-forwarded-prefix", "sec-fetch-site", "access-control-request-method"),
]
Drawn = tuple[str, str, str, dict[str, str], bytes]
"""Method, path, query, headers and body."""


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


class Hostile:
    """Draws requests for the routes of a server: each is a good one but for its headers, path, query or body."""

    def __init__(self, server: Server, seed: int, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """`headers`: of every request that has none of these names."""
        self._random, self._headers_of_all = random.Random(seed), {"host": "t", **JSON, **headers}
        self._routes = [
            (method, route.path)
            for route in server.app.routes
            if isinstance(route, Route) and route.path != "/rl/events"  # whose answer has no end
            for method in sorted(route.methods or ())
        ]

    def draw(self) -> httpx.Request:
        part = self._random.choice((self._headers, self._path, self._query, self._body, self._body))
        method, path, query, headers, content = part()
        url = httpx.URL("http://t").copy_with(raw_path=path.encode() + query.encode())
        named = {**self._headers_of_all, **headers}
        pairs = [(name.encode(), value.encode()) for name, value in named.items()]
        return httpx.Request(method, url, headers=pairs, content=content)

    def _of(self, routes: list[tuple[str, str]]) -> tuple[str, str, bytes]:
        """A method, a path and a body that are good."""
        method, route = self._random.choice(routes)
        for name, value in (("{session:path}", "s"), ("{model:path}", "m"), ("{interaction}", "0")):
            route = route.replace(name, value)
        return method, route, b"" if method in ("GET", "HEAD") else json.dumps(self._good(route)).encode()

    def _headers(self) -> Drawn:
        method, path, content = self._of([each for each in self._routes if each[0] != "HEAD"])
        headers = {}
        for name in self._random.sample(HEADERS, 2):
            text = "".join(letter for letter in self._random.choice(TEXTS) if letter not in "\r\n\0\x7f").strip()
            headers[name] = f"Bearer {text}" if name == "authorization" else text
        return method, path, "", headers, content

    def _path(self) -> Drawn:
        method, route = self._random.choice([each for each in self._routes if "{" in each[1]])
        content = b"" if method in ("GET", "HEAD") else json.dumps(self._good(route)).encode()
        for name in ("{session:path}", "{model:path}", "{interaction}"):
            text = self._random.choice(TEXTS)[:900]
            part = self._random.choice((quote(text), quote(text, safe=""), "%ff", "%ed%a0%80", "s%00", "0", "s"))
            route = route.replace(name, part)
        return method, route, "", {}, content

    def _query(self) -> Drawn:
        routes = [each for each in self._routes if each[0] == "GET" and each[1].startswith("/rl/sessions")]
        method, path, content = self._of(routes)
        name = self._random.choice(
            ("after", "cursor", "limit", "include") if "interactions" not in path else ("include",)
        )
        return method, path, f"?{name}={quote(self._random.choice(TEXTS)[:5000])}", {}, content

    def _body(self) -> Drawn:
        method, path, _ = self._of([each for each in self._routes if each[0] in ("POST", "DELETE")])
        if self._random.random() < 0.05:
            return method, path, "", {}, self._random.choice(JSON_TEXTS).encode()
        good = self._good(path)
        kept = {
            name: value
            for name, value in good.items()
            if self._random.random() < 0.5 or name in ("messages", "input", "contents")
        }
        marked = self._marked(kept, [*good, "metadata", NUL])
        return method, path, "", {}, json.dumps(marked).replace('"HERE"', self._random.choice(JSON_TEXTS)).encode()

    def _good(self, path: str) -> dict[str, Any]:
        return next((body for end, body in BODIES.items() if path.endswith(end)), {"a": 1, "version": 1})

    def _marked(self, body: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """The body with a mark as the value of one of these fields, or somewhere within a value of it."""
        name = self._random.choice(names)
        value = body.get(name)
        if isinstance(value, dict) and value and self._random.random() < 0.7:
            return {**body, name: self._marked(value, [*value, "x"])}
        if isinstance(value, list) and value and self._random.random() < 0.7:
            first = self._marked(value[0], [*value[0], "x"]) if isinstance(value[0], dict) else "HERE"
            return {**body, name: [first, *value[1:]]}
        return {**body, name: 0 if name == "wait_s" else "HERE"}


async def assert_survives(server: Server, hostile: Hostile, caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Send this many requests. None may fail the server, or be answered by a database or an engine that refuses it."""
    statuses: Counter[int] = Counter()
    with caplog.at_level(logging.WARNING):
        for _ in range(number):
            request = hostile.draw()
            async with asyncio.timeout(60):
                response = await server.http.send(request)
            told = (request.method, request.url.raw_path[:200], request.headers, request.content[:500], response.text)
            assert response.status_code < 500 or response.status_code == 501, told
            assert len(response.content) < 200_000, told
            statuses[response.status_code] += 1
            if request.url.path.startswith("/engine/"):  # else turns wait
                await server.http.post("/engine/resume_memory", headers=ADMIN)
                await server.http.post("/engine/continue_generation", headers=ADMIN)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
    assert min(statuses[200], statuses[400], statuses[404]) > number // 50, statuses


@pytest.mark.wide
async def test_no_request_fails_an_open_server(
    tmp_path: Path, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, always(), database_url=database_url, migrate=True) as server:
        await server.chat([user("hi")])
        await assert_survives(server, Hostile(server, seed=7), caplog, 700)
        await server.chat([user("again")], "other")


async def test_no_request_fails_a_server_with_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, always(), admin_key="admin", forwarded_allow_ips="*") as server:
        await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        await assert_survives(server, Hostile(server, seed=8, headers=ADMIN), caplog, 500)


async def test_no_request_fails_a_server_in_front_of_engine_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wire = LiveWire()
    await wire.start()
    settings = Settings(engine=wire.url, database_url=default_url(tmp_path), max_tokens_per_turn=3)
    app = build_app(settings, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON, timeout=60)
    async with app.router.lifespan_context(app), client as http:
        server = Server(app, http, app.state.engine)
        await server.chat([user("hi")])
        steps = [step for step in WeightTransfer if step in ("begin_weight_update", "init_weights_update_group")]
        for step in steps:  # the others are unknown to the simulated server
            for text in JSON_TEXTS:
                for name in ("weight_version", "rank_offset", "version", "master_address", NUL):
                    body = json.dumps({name: "HERE"}).replace('"HERE"', text)
                    response = await http.post(f"/engine/{step}", content=body)
                    assert response.status_code in (200, 400), (body[:300], response.text)
            for digits in (4301, 20_000):
                body = json.dumps({"weight_version": "9" * digits})
                assert (await http.post(f"/engine/{step}", content=body)).status_code == 200
        assert (await http.post("/engine/begin_weight_update", json={"version": 3})).json()["version"] == 3
    await wire.kill()
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


async def test_no_delivery_fails_the_mailbox(tmp_path: Path, database_url: str) -> None:
    async with posting(tmp_path, database_url=database_url) as server:
        waiting = server.ask()
        letter = await server.letter()
        for name in ("text", "output_ids", "logprobs", "message", "response", "error", "version", "finish_reason"):
            for text in JSON_TEXTS:
                rest = {"output_ids": [1]} if name in ("logprobs", "version", "finish_reason") else {}
                body = json.dumps({"interaction_id": letter["interaction_id"], **rest, name: "HERE"})
                response = await server.http.post(
                    "/mailbox/deliver", content=body.replace('"HERE"', text), headers=JSON
                )
                assert response.status_code in (200, 400), (body, text[:200], response.text)
                if response.status_code == 200:
                    await asyncio.wait([waiting])
                    waiting = server.ask()
                    letter = await server.letter()
        await server.deliver(letter, text="x")
        await waiting


@pytest.mark.parametrize("text", ["[" * 1020 + "]" * 1020, '{"a":' * 255 + "1" + "}" * 255, '"\\u0000"', "1e308"])
async def test_every_field_of_every_body_may_be_anything(tmp_path: Path, text: str) -> None:
    async with serving(tmp_path, always()) as server:
        for end, body in BODIES.items():
            for name in body:
                sent = json.dumps({**body, name: "HERE" if name != "wait_s" else 0}).replace('"HERE"', text)
                for path in (end, f"/s{end}"):
                    response = await server.http.post(path, content=sent)
                    assert response.status_code < 500 or response.status_code == 501, (path, name, response.text)
            await server.http.post("/engine/continue_generation")
            await server.http.request("DELETE", "/engine/servers", content=sent)


@pytest.mark.parametrize("depth", [230, 240, 245, 250, 300, 700])
async def test_a_turn_that_is_taken_can_be_shown_and_exported(tmp_path: Path, depth: int) -> None:
    nested = '{"a":' * depth + "{}" + "}" * depth
    fields: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "HERE"}}]},
        {"chat_template_kwargs": {"a": "HERE"}},
        {"metadata": {"a": "HERE"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "HERE"}}},
        {
            "messages": [
                user("x"),
                assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}", "x": "HERE"}}]),
                user("y"),
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": "HERE"}]}]},
    ]
    async with serving(tmp_path, always()) as server:
        for name, more in enumerate(fields):
            text = json.dumps({**CHAT_OF_ONE, **more})
            for _ in range(2):
                taken = await server.http.post(f"/s{name}/v1/chat/completions", content=text.replace('"HERE"', nested))
                assert taken.status_code in (200, 400), taken.text
            if taken.status_code == 400:
                continue
            include = "messages,ids,logprobs,reply,times,compared"
            for path in (f"s{name}/interactions/0?include={include}", f"s{name}/interactions/1?include={include}"):
                assert (await server.http.get(f"/rl/sessions/{path}")).status_code == 200, more
            assert (await server.http.get(f"/rl/sessions/s{name}?include=compared")).status_code == 200, more
            for layout in ("json", "jsonl", "npz", "areal"):
                wanted = {"session_id": f"s{name}", "format": layout, "include": ["messages", "text"]}
                assert (await server.post("/trajectories/export", wanted)).status_code == 200, (layout, more)


@pytest.mark.parametrize("digits", [19, 400, 4300, 4301, 50_000])
async def test_numbers_of_any_length_are_numbers_or_refused(tmp_path: Path, digits: int) -> None:
    number = "9" * digits
    async with serving(tmp_path, always()) as server:
        for path in ("/s/v1/chat/completions", "/s/v1/messages", "/s/v1/generate", "/s/v1/messages/count_tokens"):
            body = {"model": "m", "max_tokens": 4, "input_ids": [1]} | (
                {} if "generate" in path else {"messages": [user("x")]}
            )
            if "generate" not in path:
                del body["input_ids"]
            retried = await server.post(path, body, headers={"x-stainless-retry-count": number})
            assert retried.status_code == 200, retried.text
            too_long = await server.post(path, body, headers={"content-length": number})
            assert too_long.status_code == 413, too_long.text
        page = await server.http.get(f"/rl/sessions?limit={number}")
        assert (page.status_code, page.json()["error"]["param"]) == (400, "limit")
        version = await server.post("/engine/update_weights", {"path": "/x", "version": float("1" + "0" * 300)})
        assert version.status_code == 400


async def test_a_nul_in_a_cursor_or_an_id_is_refused_alike_by_each_database(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, always(), database_url=database_url, migrate=True) as server:
        for name in ("after", "cursor"):
            refused = await server.http.get(f"/rl/sessions?{name}=%00")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cursor")
        assert (await server.http.get("/rl/sessions/a%00b")).status_code == 404
        assert (await server.http.get("/rl/sessions/a%00b/interactions/0")).status_code == 404
        for field in ("task_id", "session_id", "group_id", "api_key"):
            body = {"task_id": "t", field: NUL}
            refused = await server.post("/rl/start_session", body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        await server.ok("/v1/chat/completions", {"model": "m", "messages": [user("x")]})
        for path, body, field in (
            ("/rl/set_reward", {"reward": 1, "interaction_id": NUL}, "interaction_id"),
            ("/rl/mark", {"interaction_id": NUL, "trainable": True}, "interaction_id"),
            ("/v1/chat/completions", {"model": "m", "messages": [user("x")], "stop": ["a", NUL]}, "stop[1]"),
            ("/v1/chat/completions", {"model": NUL, "messages": [user("x")]}, "model"),
            ("/trajectories/acknowledge", {"claim_id": NUL}, "claim_id"),
            ("/trajectories/export", {"session_id": NUL}, "session_id"),
            ("/trajectories/export", {"filter": {"group_id": NUL}}, "filter.group_id"),
        ):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
        # JSON is stored as bytes: what may be any value may hold any character.
        kept = {"a\0b": "\0", "c": ["\0"]}
        await server.ok("/rl/start_session", {"session_id": "kept", "metadata": kept})
        await server.chat([user(NUL)], "kept", metadata=kept)
        assert (await server.http.get("/rl/sessions/kept")).json()["metadata"] == kept
        for wanted in (kept, {"c": NUL}, {NUL: 1}, {"c": [NUL, "x"]}):
            found = await server.post("/trajectories/export", {"filter": {"metadata": wanted}})
            assert found.status_code == 200, found.text


async def status_of(server: Server, method: str, path: str, body: bytes = b"") -> int:
    """The status of a request whose path httpx would resolve."""
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"}
    sent: list[Any] = []
    parts = [body]

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop()} if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await server.app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize("session", [".", "..", "a/.", "../a", "a/../b", "a/../../b", "./a", "a/./b", "..~x"])
async def test_a_session_id_with_dot_segments_is_refused_everywhere(tmp_path: Path, session: str) -> None:
    async with serving(tmp_path, always()) as server:
        if session != "..~x":
            refused = await server.post("/rl/start_session", {"session_id": session})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
            assert ". or .." in refused.json()["error"]["message"]
        turn = json.dumps({"model": "m", "messages": [user("x")]}).encode()
        statuses = [
            await status_of(server, "POST", f"/{session}/v1/chat/completions", turn),
            await status_of(server, "GET", f"/rl/sessions/{session}"),
            await status_of(server, "GET", f"/rl/sessions/{session}/interactions/0"),
            await status_of(server, "POST", f"/{session}/rl/set_reward", b'{"reward": 1}'),
            await status_of(server, "POST", f"/{session}/v1/messages/count_tokens", turn),
        ]
        assert statuses == [200 if session == "..~x" else 400] * 5
        encoded = session.replace(".", "%2e").replace("/", "%2f")
        turned = await server.http.post(f"/{encoded}/v1/chat/completions", content=turn)
        assert turned.status_code == statuses[0]
        for good in ("a.b", "...", "a/..b", ".a", "a~.."):
            assert (await server.post("/rl/start_session", {"session_id": good})).status_code == 200
