"""The listener for agents on other machines: their endpoints alone, keys of sessions only, and limits of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from proxy.api.addresses import Addresses
from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.serving.server import Servers
from proxy.settings import Settings
from tests.support import JSON, Server, real_server, sampled, says, serving, until, user
from tokengrove.errors import ConfigurationError, EngineFailed, ProxyError, TooManyRequests

ADMIN_KEY = "the-key-of-the-administrator"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BODY: dict[str, Any] = {"model": "m", "messages": [user("hi")]}
APIS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", BODY),
    ("completions", {"model": "m", "prompt": "hi"}),
    ("responses", {"model": "m", "input": "hi"}),
    ("messages", {"model": "m", "max_tokens": 9, "messages": [user("hi")]}),
    ("messages/count_tokens", {"model": "m", "messages": [user("hi")]}),
    ("responses/input_tokens", {"model": "m", "input": "hi"}),
    ("tokenize", {"model": "m", "prompt": "hi"}),
    ("generate", {"input_ids": [1, 2], "max_tokens": 4}),
]


class Outside:
    """A server with a listener for agents: `main`, and a client `http` of the listener."""

    def __init__(self, main: Server, http: httpx.AsyncClient) -> None:
        self.main, self.http = main, http

    async def started(self, **more: Any) -> Any:
        return await self.main.ok("/rl/start_session", {"task_id": "t", **more}, headers=ADMIN)

    async def turn(self, key: str, path: str = "/v1/chat/completions", body: Any = BODY) -> httpx.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


@contextlib.asynccontextmanager
async def outside(folder: Path, script: Script, **more: Any) -> AsyncIterator[Outside]:
    settings = {"admin_key": ADMIN_KEY, "agent_port": 0, **more}
    async with serving(folder, script, **settings) as main:
        main.app.state.agents._app.wrong_keys = None
        transport = httpx.ASGITransport(app=main.app.state.agents, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://agents", headers=JSON) as http:
            yield Outside(main, http)


@pytest.mark.parametrize(("path", "body"), APIS)
async def test_agents_use_the_apis_with_the_key_and_with_the_address_of_their_session(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with outside(tmp_path, says(*["yes"] * 4)) as server:
        started = await server.started()
        answers = [
            await server.turn(started["api_key"], f"/v1/{path}", body),
            await server.turn(started["api_key"], f"/{started['session_id']}/v1/{path}", body),
            await server.http.post(f"{httpx.URL(started['base_url']).path}/{path}", json=body),
        ]
        assert [answer.status_code for answer in answers] == [200] * 3, answers[-1].text


async def test_every_other_endpoint_of_the_server_is_absent(tmp_path: Path) -> None:
    """The canary: a new endpoint is not at the listener unless it is listed here."""
    ends = {path for path, _ in APIS} | {"detokenize", "parse", "models", "models/{model:path}"}
    google = {f"models/{{model:path}}:{call}" for call in ("generateContent", "streamGenerateContent", "countTokens")}
    versions = {"": ends | google, "/v1": ends | google, "/v1alpha": google}
    versions["/v1beta"] = google | {"models", "models/{model:path}"}
    sessions = ("", "/{session:path}")
    for_agents = {f"{at}{version}/{end}" for at in sessions for version, known in versions.items() for end in known}
    async with outside(tmp_path, says()) as server:
        started = await server.started()
        keys = (ADMIN_KEY, started["api_key"], started["control_key"])
        there = {route.path for route in server.main.app.state.agents._app.routes if isinstance(route, Route)}
        assert there == for_agents | {"/health", "/engine/models"}
        others = [each for each in server.main.app.routes if isinstance(each, Route) and each.path not in for_agents]
        others = [each for each in others if each.path != "/health"]
        assert len(others) > 50
        for route in others:
            path = re.sub(r"{session(:path)?}", started["session_id"], route.path)
            path = re.sub(r"{[a-z]+(:path)?}", "x", path)
            for method in route.methods or ():
                for key in keys:
                    headers = {**JSON, "authorization": f"Bearer {key}"}
                    answer = await server.http.request(method, path, headers=headers, content=b"{}")
                    assert answer.status_code == 404, (method, path, answer.text)
                    if method != "HEAD":
                        assert answer.json()["error"]["code"] == "not_found"


async def test_an_admin_key_is_an_unknown_key_there(tmp_path: Path) -> None:
    async with outside(tmp_path, says("yes"), trainer_key="the-key-of-the-trainers") as server:
        session = (await server.started())["session_id"]
        for path in ("/v1/chat/completions", f"/{session}/v1/chat/completions", f"/~{ADMIN_KEY}/v1/chat/completions"):
            told = [await server.turn(key, path) for key in (ADMIN_KEY, "unknown", "the-key-of-the-trainers")]
            assert [answer.status_code for answer in told] == [401] * 3
            assert len({answer.text for answer in told}) == 1
        unknown = await server.turn("unknown", "/~unknown/v1/chat/completions")
        assert unknown.json() == (await server.turn("unknown", f"/~{ADMIN_KEY}/v1/chat/completions")).json()
        assert (await server.turn(ADMIN_KEY, "/v1/generate", {"input_ids": [1], "max_tokens": 1})).status_code == 401
        assert (await server.main.post(f"/{session}/v1/chat/completions", BODY, headers=ADMIN)).status_code == 200


async def test_the_models_are_shown_to_agents_only(tmp_path: Path) -> None:
    async with outside(tmp_path, says()) as server:
        key = {"authorization": f"Bearer {(await server.started())['api_key']}"}
        for path in ("/v1/models", "/v1/models/m"):
            assert (await server.http.get(path)).status_code == 401
            assert (await server.http.get(path, headers=ADMIN)).status_code == 401
            assert (await server.http.get(path, headers=key)).status_code == 200


async def test_liveness_is_told_and_nothing_more(tmp_path: Path) -> None:
    async with outside(tmp_path, says()) as server:
        answer = await server.http.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert set(answer.headers) == {"content-length", "content-type", "x-request-id"}


class Failing(ScriptedEngine):
    """Fails each request, after the first token unless `at_once`."""

    failure: ProxyError = EngineFailed("")
    at_once = True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self.at_once:
            raise self.failure
        async for chunk in super().generate(request):
            yield chunk
            raise self.failure


INNER = [
    EngineFailed("SGLang at http://gpu-1.internal:30000 answered 500"),
    EngineFailed("the engine 'vllm' gave 3 logprobs for 2 tokens"),
    EngineFailed('Traceback (most recent call last): File "/srv/app/engine.py", line 3'),
    ProxyError("all 12 places of the pool are taken (--shared-running-requests)"),
    TooManyRequests("4096 turns are running (--max-turns-in-flight); try again"),
    RuntimeError("the engine of version 0.5.1 at gpu-1 crashed"),
]
REVEALING = re.compile(r"sglang|vllm|gpu-1|scripted|traceback|/srv|12|4096|--[a-z]|0\.5|logprobs for", re.IGNORECASE)


HEADERS = {"content-type", "content-length", "cache-control", "x-accel-buffering"} | {"x-request-id", "request-id"}


@pytest.mark.parametrize("failure", INNER, ids=str)
async def test_errors_there_tell_nothing_of_the_engine(
    tmp_path: Path, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "failure", failure)
    script = play([Reply(sampled("one two three"), chunk=1)] * 16)
    async with outside(tmp_path, script, engine_type=Failing) as server:
        key = (await server.started())["api_key"]
        for at_once, (path, body), stream in itertools.product((True, False), APIS[:4], (False, True)):
            monkeypatch.setattr(Failing, "at_once", at_once)
            answer = await server.turn(key, f"/v1/{path}", {**body, "stream": stream})
            told = _messages(answer.text)
            assert told and not REVEALING.search(told), answer.text
            assert set(answer.headers) <= HEADERS | {"retry-after", "x-should-retry"}


def _messages(text: str) -> str:
    """The messages of errors in a body or a stream."""
    return "\n".join(re.findall(r'"message": ?"((?:[^"\\]|\\.)*)"', text))


async def test_a_refused_request_keeps_what_its_sender_can_change(tmp_path: Path) -> None:
    async with outside(tmp_path, says(), max_body_bytes=4096) as server:
        key = (await server.started())["api_key"]
        wrong = await server.turn(key, body={**BODY, "temperature": -1})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"
        large = await server.turn(key, body={**BODY, "messages": [user("x" * 5000)]})
        assert large.status_code == 413
        assert large.json()["error"]["message"] == "the body exceeds the limit of 4096 bytes"


async def test_bodies_there_have_a_limit_and_room_of_their_own(tmp_path: Path) -> None:
    async with outside(tmp_path, says("yes"), agent_max_body_bytes=2000) as server:
        started = await server.started()
        long = {**BODY, "messages": [user("x" * 3000)]}
        assert (await server.turn(started["api_key"], body=long)).status_code == 413
        path = f"/{started['session_id']}/v1/chat/completions"
        assert (await server.main.post(path, long, headers=ADMIN)).status_code == 200


async def test_a_flood_there_is_refused_and_takes_no_place_of_the_main_listener(tmp_path: Path) -> None:
    script = play([Reply(sampled("one"), fault=Fault.HANG, fault_after=0)] * 2 + [Reply(sampled("yes"))])
    async with outside(tmp_path, script, agent_max_requests=2, shutdown_timeout_s=0.0) as server:
        started = await server.started()
        key, session = started["api_key"], started["session_id"]
        flood = [asyncio.create_task(server.turn(key)) for _ in range(2)]
        await until(lambda: len(server.main.engine.requests) == 2)
        refused = await server.turn(key)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"] == "too many requests; try again"
        assert (await server.http.get("/health")).status_code == 200
        other = await server.main.post(f"/{session}/v1/chat/completions", BODY, headers=ADMIN)
        assert other.status_code == 200
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert server.main.app.state.agents.running == 0
        # The turns go on for a while without their clients, and still have their places.
        left = await server.turn(key, body={**BODY, "messages": [user("another")]})
        assert left.status_code == 429


def test_its_connections_have_a_limit_of_their_own(tmp_path: Path) -> None:
    more: dict[str, Any] = {"admin_key": ADMIN_KEY, "agent_port": 0, "agent_max_connections": 3}
    with real_server(tmp_path, **more) as url, httpx.Client(timeout=60) as http:
        base = http.post(f"{url}/rl/start_session", json={"task_id": "t"}, headers=ADMIN).json()["base_url"]
        there = httpx.URL(base)
        with contextlib.ExitStack() as stack:
            for _ in range(40):  # none of them is in use, so they make room for each other
                stack.enter_context(socket.create_connection((there.host, there.port)))
            assert http.get(f"{url}/rl/sessions", headers=ADMIN).status_code == 200
            assert http.post(f"{base}/chat/completions", json=BODY).status_code == 200


async def test_too_few_open_files_are_shared_by_both_listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.serving.server.room_for_connections", lambda each: 90)
    async with outside(tmp_path, says(), max_connections=800, agent_max_connections=100) as server:
        settings = Settings(admin_key=ADMIN_KEY, agent_port=0, max_connections=800, agent_max_connections=100)
        servers = Servers(server.main.app, settings)
        servers.limit_connections()
        assert [each.connections.most for each in servers] == [80, 10]


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"agent_port": 9000}, "http://127.0.0.1:9000"),
        ({"agent_port": 9000, "agent_host": "10.1.2.3"}, "http://10.1.2.3:9000"),
        ({"agent_port": 9000, "agent_host": "0.0.0.0"}, "http://gateway.example:9000"),
        ({"agent_port": 9000, "agent_host": "fd00::5"}, "http://[fd00::5]:9000"),
        ({"agent_port": 9000, "public_url": "https://agents.example/a"}, "https://agents.example/a"),
        ({}, "http://gateway.example:8080"),
    ],
)
def test_sessions_get_the_address_of_the_listener(settings: dict[str, Any], url: str) -> None:
    from starlette.requests import Request

    addresses = Addresses(Settings(admin_key=ADMIN_KEY, **settings))
    addresses.agent_port = settings.get("agent_port")
    headers = [(b"host", b"gateway.example:8080")]
    scope = {"type": "http", "scheme": "http", "path": "/rl/start_session", "headers": headers, "query_string": b""}
    assert addresses.root_url(Request(scope)) == url


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"agent_port": 9000}, "--agent-port needs --admin-key"),
        ({"expose": "cloudflared"}, "--expose needs --admin-key"),
        ({"agent_port": 8080, "admin_key": ADMIN_KEY}, "--agent-port 8080 is --port"),
        ({"agent_port": 9, "metrics_port": 9, "admin_key": ADMIN_KEY}, "--agent-port 9 is --metrics-port"),
        ({"agent_host": "0.0.0.0"}, "--agent-host has no effect without --agent-port"),
        ({"agent_max_body_bytes": 9}, "--agent-max-body-bytes has no effect without --agent-port"),
        ({"agent_port": 9000, "agent_host": "a b", "admin_key": ADMIN_KEY}, "--agent-host 'a b' is neither"),
        ({"expose": "ssh far", "admin_key": ADMIN_KEY}, "neither cloudflared nor a command with {port}"),
        ({"expose": "ssh '{port}", "admin_key": ADMIN_KEY}, "is not a command"),
        ({"expose": "cloudflared", "admin_key": ADMIN_KEY, "public_url": "http://a"}, "--public-url"),
    ],
)
def test_settings_that_contradict_the_listener_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        Settings(**settings)


async def test_keys_of_sessions_are_not_chosen_where_strangers_may_guess_them(tmp_path: Path) -> None:
    async with outside(tmp_path, says()) as server:
        chosen = await server.main.post("/rl/start_session", {"task_id": "t", "api_key": "k" * 32}, headers=ADMIN)
        assert chosen.status_code == 400 and "--allow-chosen-keys" in chosen.text


def test_a_stream_there_ends_whole_when_the_server_stops(tmp_path: Path) -> None:
    slow = ("play=babble", "chunk=1", "tokens=40", "delay_s=0.02")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as other:
        url = stack.enter_context(real_server(tmp_path, admin_key=ADMIN_KEY, agent_port=0, engine_arg=slow))
        started = httpx.post(f"{url}/rl/start_session", json={"task_id": "t"}, headers=ADMIN).json()
        base, body = started["base_url"], {**BODY, "stream": True}
        with httpx.stream("POST", f"{base}/chat/completions", json=body, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            stopped = other.submit(stack.close)
            assert list(lines)[-1] == "data: [DONE]"
        stopped.result()
    for address in (url, base):
        with pytest.raises(httpx.ConnectError):
            httpx.get(address)
