"""Errors tell agents no address, socket or path of the machines behind the server; administrators read them whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.api.neutral_errors import is_administration, neutral
from proxy.app import build_app
from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply
from proxy.settings import Settings
from proxy.store.open_database import OpenDatabase
from tests.engines.wire import LiveWire
from tests.logs import fields_of
from tests.support import JSON, Server, default_url, sampled, tiny_renderer, user
from tests.wide import CROSSED
from tokengrove.errors import EngineFailed, EngineLost, EngineUnavailable, InvalidRequest, ProxyError, StoreUnavailable

ADMIN = {"authorization": "Bearer admin"}
PLACES = [
    "http://gpu-1.internal:30000 does not answer ([Errno 111] Connect call failed ('10.0.0.2', 30000))",
    "no engine server is available (http://gpu-1.internal:30000: it answers 500)",
    "connection to [fd00::5] failed",
    "cannot connect to ::1",
    "the database refused a read: connection to server on socket \"/tmp/x/.s.PGSQL.5432\" failed: No such file",
    'the database refused a read: connection to server at "db.internal", port 5432 failed',
    'the database refused a read: could not translate host name "db.internal" to address',
    "the database refused the commit: could not open file \"base/16384/2619\": Permission denied",
    "the engine failed: out of memory at /models/secret/weights.safetensors",
]  # fmt: skip
PLAIN = [
    "generation has been paused for more than 120 s (--pause-timeout-s); try again",
    "memory is released; POST /engine/resume_memory first",
    "the database refused the commit: database or disk is full",
    "the engine gave 3 logprobs for 2 tokens",
    "the engine gave token 1000000, but the model's token ids are 0 to 151935",
    "no capacity is left (--capacity-control); grant more with POST /rl/grant_capacity",
    "worker 1 of this server has stopped and is being started again",
]
APIS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": [user("hi")]}),
    ("completions", {"prompt": "hi"}),
    ("responses", {"input": "hi"}),
    ("messages", {"max_tokens": 9, "messages": [user("hi")]}),
]


class FailingEngine(ScriptedEngine):
    """Fails every request with `failure`, after the first part of an answer unless it is `at_once`."""

    failure: ProxyError = EngineFailed(PLACES[0])
    at_once = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self.at_once:
            raise self.failure
        async for chunk in super().generate(request):
            yield chunk
            raise self.failure


@contextlib.asynccontextmanager
async def failing(folder: Path, **settings: Any) -> AsyncIterator[tuple[Server, FailingEngine]]:
    reply = Reply(sampled("one two three"), chunk=1)
    engine = FailingEngine(lambda request: reply, vocab_size=tiny_renderer().vocab_size)
    configured = Settings(database_url=default_url(folder), migrate=True, admin_key="admin", **settings)
    app = build_app(configured, engine=engine, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, engine), engine


def secrets_in(text: str) -> list[str]:
    return [place for place in ("internal", "10.0.0.2", "30000", "/tmp", ".s.PGSQL", "5432", "secret") if place in text]


@CROSSED
@pytest.mark.parametrize("message", PLACES)
@pytest.mark.parametrize("kind", [EngineFailed, EngineLost, EngineUnavailable, StoreUnavailable, ProxyError])
def test_a_failure_that_names_a_place_becomes_a_sentence_of_its_class(kind: type[ProxyError], message: str) -> None:
    error = kind(message)
    error.param, error.retry_after_s, error.details = "p", 3, {"a": 1}
    told = neutral(error)
    assert error.message == message
    assert (type(told), told.param, told.retry_after_s, told.details) == (kind, "p", 3, {"a": 1})
    assert not secrets_in(told.message) and ":" not in told.message and "log has the reason" in told.message


@pytest.mark.parametrize("message", PLAIN)
def test_a_failure_without_a_place_is_told_as_it_is(message: str) -> None:
    error = EngineUnavailable(message)
    assert neutral(error) is error


def test_what_is_wrong_with_a_request_is_told_whole() -> None:
    error = InvalidRequest("'image_url' must not be http://10.0.0.2/x.png")
    assert neutral(error) is error


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_agents_are_told_no_address_and_administrators_find_it(
    tmp_path: Path, stream: bool, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with failing(tmp_path) as (server, engine):
        engine.at_once = at_once
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        for path, body in APIS:
            response = await server.post(f"{started['base_url']}/{path}", {"model": "m", "stream": stream, **body})
            assert response.status_code == (200 if stream and not at_once else 502), response.text
            assert not secrets_in(response.text) and "the engine failed" in response.text
        ids = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}
        generated = await server.post(f"{started['base_url']}/generate", ids)
        assert generated.status_code == 502 and not secrets_in(generated.text)
        tree = (await server.http.get("/rl/sessions/s", headers=ADMIN)).json()["interactions"]
        assert {node["error"] for node in tree} == {PLACES[0]}
        turns = [turn for turn in fields_of(caplog, "turn") if turn["error"] == PLACES[0]]
        assert len(turns) == len(APIS) + 1 and not fields_of(caplog, "refused")


class RefusingWire(LiveWire):
    """A server that answers every generation with `status`, once it is set."""

    status = 0

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.status or scope["path"] != "/generate":
            await super()._answer(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("status", [400, 401, 404, 418, 500])
async def test_whatever_an_engine_server_answers_its_address_stays_secret(tmp_path: Path, status: int) -> None:
    wire = RefusingWire()
    await wire.start()
    settings = Settings(engine=wire.url, database_url=default_url(tmp_path), migrate=True, pause_timeout_s=0.1)
    app = build_app(settings, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON, timeout=60)
    try:
        async with app.router.lifespan_context(app), client as http:
            wire.status = status
            server = Server(app, http, app.state.engine)
            port = wire.url.rpartition(":")[2]
            for stream in (False, True):
                for path, body in APIS:
                    response = await server.post(f"/s/v1/{path}", {"model": "m", "stream": stream, **body})
                    assert response.status_code >= 400, response.text
                    assert port not in response.text and "127.0.0.1" not in response.text
            ready = await http.get("/ready")
            assert port not in ready.text and "127.0.0.1" not in ready.text
    finally:
        await wire.kill()


async def test_a_database_that_fails_is_not_described_to_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with failing(tmp_path) as (server, _):
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)

        async def refuse(self: OpenDatabase, *arguments: Any) -> Any:
            raise StoreUnavailable(PLACES[4])

        monkeypatch.setattr(OpenDatabase, "read", refuse)
        for method, path, body in (
            ("POST", f"{started['root_url']}x/v1/chat/completions", {"model": "m", "messages": [user("x")]}),
            ("POST", "/v1/messages/count_tokens", {"model": "m", "messages": [user("x")]}),
            ("POST", "/rl/set_reward", {"reward": 1}),
        ):
            response = await server.http.request(method, path, content=json.dumps(body), headers={"x-api-key": "k"})
            assert response.status_code in (503, 529), response.text
            assert not secrets_in(response.text)
        told = await server.http.get("/rl/sessions", headers=ADMIN)
        assert told.status_code == 503 and PLACES[4] in told.json()["error"]["message"]


async def test_paths_of_administrators_want_the_admin_key_before_anything_else(tmp_path: Path) -> None:
    async with failing(tmp_path) as (server, _):
        for route in server.app.routes:
            path = route.path  # type: ignore[attr-defined]
            if is_administration(path):
                for method in route.methods:  # type: ignore[attr-defined]
                    response = await server.http.request(method, path, content=b"{")
                    assert response.status_code == 401, (method, path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "body"), APIS)
async def test_a_refused_format_is_named_although_the_engine_does_not(
    tmp_path: Path, api: str, body: dict[str, Any], stream: bool
) -> None:
    async with failing(tmp_path) as (server, engine):
        engine.at_once = True
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        for demanded, param in [({"structured_outputs": {"regex": "a{2"}}, "structured_outputs.regex"), ({}, None)]:
            engine.failure = InvalidRequest(f"{PLACES[0]} refused").showing("the engine refused the request")
            asked = {"model": "m", **body, **demanded, "stream": stream}
            response = await server.post(f"{started['base_url']}/{api}", asked)
            assert response.status_code == 400, response.text
            told = f", perhaps because of '{param}'" if param else ""
            error = response.json()["error"]
            assert error["message"] == f"the engine refused the request{told}; the server's log has the reason"
            assert error.get("param") == param or api == "messages"
