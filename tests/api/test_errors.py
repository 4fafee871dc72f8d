"""Every failure has its status, its code and the envelope of the called API; a retryable one has retry-after."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from starlette.requests import Request
from starlette.routing import Route

from proxy.engine import gate
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.scripts import Fault, Reply, Script
from tests.databases import execute
from tests.support import Server, sampled, serving, user
from tokengrove import errors

CHAT = "/s/v1/chat/completions"
GOOD = {"model": "m", "messages": [user("hi")]}
Case = Callable[[Server], Any]


def always(reply: Reply | None = None) -> Script:
    reply = reply or Reply(sampled("ok"), chunk=64)
    return lambda request: reply


def raising(error: Exception) -> Script:
    def script(request: GenerateRequest) -> Reply:
        raise error

    return script


async def good(server: Server) -> httpx.Response:
    return await server.post(CHAT, GOOD)


async def scratch_full(server: Server) -> httpx.Response:
    await good(server)
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("proxy.export_formats.spool.TemporaryFile", side_effect=full):
        return await server.post("/trajectories/export", {"session_id": "s", "format": "npz"})


async def reward_by_agent(server: Server) -> httpx.Response:
    admin = {"x-api-key": KEYED["admin_key"]}
    started = await server.http.post("/rl/start_session", json={"task_id": "t"}, headers=admin)
    agent = {"x-api-key": started.json()["api_key"]}
    return await server.http.post("/rl/set_reward", json={"reward": 1.0}, headers=agent)


async def start_by_reader(server: Server) -> httpx.Response:
    reader = {"x-api-key": READ["reader_key"]}
    return await server.http.post("/rl/start_session", json={"task_id": "t"}, headers=reader)


async def audio(server: Server) -> httpx.Response:
    return await server.post(CHAT, {**GOOD, "audio": {"voice": "x"}})


async def no_such_response(server: Server) -> httpx.Response:
    return await server.post("/s/v1/responses", {"model": "m", "input": "x", "previous_response_id": "resp_x"})


async def no_json(server: Server) -> httpx.Response:
    return await server.http.post(CHAT, content=b"{")


async def as_text(server: Server) -> httpx.Response:
    return await server.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})


async def key_in_use(server: Server) -> httpx.Response:
    await server.ok("/rl/start_session", {"task_id": "t", "api_key": "17"})
    return await server.post("/rl/start_session", {"task_id": "t", "api_key": "17"})


async def closed(server: Server) -> httpx.Response:
    await server.post(CHAT, GOOD)
    await server.ok("/s/rl/end_session", {})
    return await server.post(CHAT, GOOD)


async def with_a_key_of_another_call(server: Server) -> httpx.Response:
    headers = {"idempotency-key": "one"}
    await server.ok("/rl/start_session", {"session_id": "s"}, headers=headers)
    return await server.post("/rl/start_session", {"session_id": "r"}, headers=headers)


async def ended_otherwise(server: Server) -> httpx.Response:
    await server.post(CHAT, GOOD)
    await server.ok("/s/rl/end_session", {"outcome": "Finished"})
    return await server.post("/s/rl/end_session", {"outcome": "Failed"})


async def annotated_otherwise(server: Server) -> httpx.Response:
    reply = await server.ok(CHAT, GOOD)
    for value in (1, 2):
        sample = {"turns": [{"interaction_id": reply["id"], "span": [0, 1]}], "streams": {"entropy": [value]}}
        answer = await server.post("/trajectories/annotate", {"step": 0, "samples": [sample]})
    return answer


async def note_archived(server: Server) -> None:
    """Note two sessions as archived in a file that there is not."""
    url = str(server.app.state.store.database.url)
    where = "'file:///none/file.parquet'"
    execute(url, f"INSERT INTO archive_files (file, state, created_at) VALUES ({where}, 'settled', 1.0)")
    columns = "session_id, file, number, task_id, ended_at, turns, archived_at"
    for name in ("s", "r"):
        values = f"'{name}', {where}, 1, 't', 1.0, 1, 1.0"
        execute(url, f"INSERT INTO archived_sessions ({columns}) VALUES ({values})")


async def archived(server: Server) -> httpx.Response:
    await note_archived(server)
    return await server.post(CHAT, GOOD)


async def archive_lost(server: Server) -> httpx.Response:
    await note_archived(server)
    return await server.http.delete("/rl/sessions/s")


async def limit_reached(server: Server) -> httpx.Response:
    await server.ok("/rl/start_session", {"session_id": "s", "limits": {"max_turns": 1}})
    await server.post(CHAT, GOOD)
    return await server.post(CHAT, GOOD)


async def store_closed(server: Server) -> httpx.Response:
    await server.app.state.store.close()
    return await server.post(CHAT, GOOD)


def get(path: str, **more: Any) -> Case:
    async def call(server: Server) -> httpx.Response:
        return await server.http.get(path, **more)

    return call


async def crash(server: Server) -> httpx.Response:
    async def endpoint(request: Request) -> None:
        raise RuntimeError("a bug")

    server.app.router.routes.append(Route("/crash", endpoint))
    return await server.http.get("/crash")


def unknown_interaction(server: Server) -> Any:
    async def call() -> httpx.Response:
        await server.post(CHAT, GOOD)
        return await server.post("/s/rl/set_reward", {"reward": 1, "interaction_id": "chatcmpl-unknown"})

    return call()


KEYED = {"admin_key": "admin"}
READ = {**KEYED, "reader_key": "reader"}
HANG = Reply(sampled("ok"), fault=Fault.HANG)
FAIL = Reply(sampled("ok"), fault=Fault.ERROR)
CASES: list[tuple[type[errors.ProxyError], Case, Script, dict[str, Any]]] = [
    (errors.ProxyError, crash, always(), {}),
    (errors.InvalidRequest, no_json, always(), {}),
    (errors.UnsupportedParameter, audio, always(), {}),
    (errors.ContextLengthExceeded, good, always(), {"max_context_tokens": 5}),
    (errors.KeyInUse, key_in_use, always(), {}),
    (errors.Unauthorized, get("/rl/sessions"), always(), KEYED),
    (errors.Forbidden, reward_by_agent, always(), KEYED),
    (errors.ReadOnlyKey, start_by_reader, always(), READ),
    (errors.HostNotAllowed, get("/health", headers={"host": "evil.example"}), always(), {}),
    (errors.OriginNotAllowed, get("/health", headers={"origin": "null"}), always(), {}),
    (errors.SessionClosed, closed, always(), {}),
    (errors.LimitReached, limit_reached, always(), {}),
    (errors.NotFound, unknown_interaction, always(), {}),
    (errors.NotFound, get("/nothing/here"), always(), {}),
    (errors.ModelNotFound, good, raising(errors.ModelNotFound("the model 'm' does not exist")), {}),
    (errors.PreviousResponseNotFound, no_such_response, always(), {}),
    (errors.SessionNotFound, get("/rl/sessions/other"), always(), {}),
    (errors.MethodNotAllowed, get(CHAT), always(), {}),
    (errors.RequestTimeout, good, raising(errors.RequestTimeout("late")), {}),
    (errors.EndedOtherwise, ended_otherwise, always(), {}),
    (errors.IdempotencyMismatch, with_a_key_of_another_call, always(), {}),
    (errors.AnnotatedOtherwise, annotated_otherwise, always(), {}),
    (errors.SessionArchived, archived, always(), {}),
    (errors.ArchiveUnavailable, archive_lost, always(), {}),
    (errors.BodyTooLarge, good, always(), {"max_body_bytes": 10}),
    (errors.UnsupportedMediaType, as_text, always(), {}),
    (errors.TooManyRequests, good, raising(errors.TooManyRequests("full", retry_after_s=400)), {}),
    (errors.HeadersTooLarge, good, raising(errors.HeadersTooLarge("long")), {}),
    (errors.TooManyConnections, good, raising(errors.TooManyConnections("full")), {}),
    (errors.TunnelUnavailable, good, raising(errors.TunnelUnavailable("starting again")), {}),
    (errors.EngineFailed, good, always(FAIL), {}),
    (errors.EngineFailed, good, raising(ZeroDivisionError("a bug in the engine")), {}),
    (errors.UpstreamFailed, good, raising(errors.UpstreamFailed("the external model fails")), {}),
    (errors.EngineUnavailable, good, raising(errors.EngineUnavailable("paused")), {}),
    (errors.EngineLost, good, raising(errors.EngineLost("gone")), {}),
    (errors.EngineBusy, good, raising(errors.EngineBusy("full")), {}),
    (errors.EngineIncapable, get("/engine/servers"), always(), {}),
    (errors.StoreUnavailable, store_closed, always(), {}),
    (errors.ScratchFull, scratch_full, always(), {}),
    (errors.EngineTimeout, good, always(HANG), {"engine_timeout_s": 0.05}),
]
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


def every_class(root: type[errors.ProxyError]) -> set[type[errors.ProxyError]]:
    """The error classes of errors.py; the client library's own errors are not part of them."""
    own = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return {root}.union(*map(every_class, own))


def test_every_error_class_has_a_case() -> None:
    assert {case[0] for case in CASES} == every_class(errors.ProxyError)


@pytest.mark.parametrize(
    ("kind", "case", "script", "settings"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
async def test_each_error_has_its_status_and_openai_envelope(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[errors.ProxyError],
    case: Case,
    script: Script,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setattr(gate, "_WAIT_S", 0.0)
    async with serving(tmp_path, script, **settings) as server:
        response = await case(server)
        assert response.status_code == kind.status, response.text
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == kind.code
        assert error["type"] == OPENAI_TYPES.get(kind.status, "server_error")
        assert isinstance(error["message"], str) and error["message"]
        assert response.headers["x-should-retry"] == ("true" if kind.retryable else "false")
        assert response.headers["x-request-id"].startswith("req_") and "request-id" not in response.headers
        if kind.status in (429, 503):
            assert 1 <= int(response.headers["retry-after"]) <= 30
        else:
            assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("status", "kind", "retried"),
    [(404, "not_found", False), (422, "invalid_request", False), (429, "rate_limit", True)],
)
async def test_the_status_of_an_external_model_reaches_the_client(
    tmp_path: Path, status: int, kind: str, retried: bool
) -> None:
    failure = errors.UpstreamFailed("it fails", status=status, retry_after_s=7)
    async with serving(tmp_path, raising(failure)) as server:
        response = await server.post(CHAT, GOOD)
        assert response.status_code == status
        assert response.json()["error"]["code"] == "upstream_failed"
        assert response.json()["error"]["type"] == f"{kind}_error"
        assert response.headers["x-should-retry"] == ("true" if retried else "false")
        assert response.headers.get("retry-after") == ("7" if retried else None)


def test_clients_retry_only_failures_that_can_pass() -> None:
    """SDKs retry 408, 409, 429 and 5xx: no permanent failure has such a status, except 409 of an end, which no SDK asks
    for, and 501; both send the header that says so."""
    for kind in every_class(errors.ProxyError):
        final = kind.status < 500 and kind.status not in (408, 409, 429)
        assert kind.retryable is not (final or kind.status in (409, 501)), kind


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/s"),
        ("POST", "/v1"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/images/generations"),
        ("POST", "/s/v1/audio/speech"),
        ("GET", "/rl"),
        ("POST", "/rl/unknown"),
        ("DELETE", "/favicon.ico"),
        ("GET", "/%00%ff"),
    ],
)
async def test_an_unknown_path_is_404_json(tmp_path: Path, method: str, path: str) -> None:
    async with serving(tmp_path, always()) as server:
        response = await server.http.request(method, path)
        assert response.status_code == 404, response.text
        assert response.json()["error"]["code"] == "not_found"


async def test_an_unknown_path_says_what_the_server_is_and_where_its_endpoints_are(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        message = (await server.http.get("/{x}")).json()["error"]["message"]
        assert "this is a Tokengrove server, and it has no endpoint GET /{x}." in message
        assert all(path in message for path in ("POST /SESSION/v1/chat/completions", "GET /health", "docs/http-api.md"))
        assert (await server.http.get("/trajectories/claim")).json()["error"]["message"].endswith("; use POST")


async def test_a_head_request_to_the_base_is_harmless(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        assert (await server.http.head("/s")).status_code == 404
        assert (await server.http.head("/health")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/s/v1/chat/completions", "POST"),
        ("GET", "/rl/set_reward", "POST"),
        ("DELETE", "/rl/sessions", "GET"),
        ("POST", "/health", "GET"),
        ("GET", "/export_trajectories", "POST"),
        ("POST", "/v1/models", "GET"),
    ],
)
async def test_a_wrong_method_is_405_and_names_the_right_one(
    tmp_path: Path, method: str, path: str, allowed: str
) -> None:
    async with serving(tmp_path, always()) as server:
        response = await server.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert allowed in response.headers["allow"]


async def test_models_have_the_form_of_both_sdks(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin", served_model_name="org/my-model") as server:
        for prefix in ("/v1", "/s/v1", "/s"):
            listing = (await server.http.get(f"{prefix}/models")).json()
            assert listing["object"] == "list" and listing["has_more"] is False
            (model,) = listing["data"]
            assert (model["id"], model["object"], model["type"]) == ("org/my-model", "model", "model")
            assert isinstance(model["created"], int) and model["created_at"].endswith("Z")
            assert listing["first_id"] == listing["last_id"] == model["id"]
            assert (await server.http.get(f"{prefix}/models/org/my-model")).json() == model
            assert (await server.http.get(f"{prefix}/models/")).json() == model


async def test_the_served_model_answers_to_any_name(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), served_model_name="org/my-model") as server:
        for prefix in ("/v1", "/s/v1", "/s"):
            for name in ("gpt-5", "openai/gpt-5"):
                model = (await server.http.get(f"{prefix}/models/{name}")).json()
                assert (model["id"], model["display_name"], model["object"]) == (name, "org/my-model", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/s/v1/messages/batches/b1/results", 404),
        ("GET", "/s/v1/messages", 405),
        ("DELETE", "/v1/messages/count_tokens", 405),
    ],
)
async def test_what_the_messages_api_lacks_here_fails_in_its_envelope(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with serving(tmp_path, always()) as server:
        response = await server.http.request(method, path)
        body = response.json()
        assert (response.status_code, body["type"]) == (status, "error")
        assert body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        assert body["request_id"] == response.headers["request-id"]


async def test_a_thread_is_refused_in_the_way_that_lets_anthropics_tool_runners_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        body = {**GOOD, "max_tokens": 8, "thread": {"type": "create"}}
        response = await server.post("/s/v1/messages", body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert "'thread'" in error["message"]
        assert (await server.post("/s/v1/messages", {**body, "thread": None})).status_code == 200
        refused = await server.post("/s/v1/messages", {**body, "thread": None, "container": "c"})
        assert "details" not in refused.json()["error"]


async def test_a_session_named_like_the_messages_api_keeps_openais_envelope(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        response = await server.post("/v1/messages/x/v1/chat/completions", {"messages": []})
        assert response.json()["error"]["code"] == "invalid_request"


async def test_a_prompt_that_is_too_long_has_openais_message(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), max_context_tokens=20) as server:
        error = (await server.post(CHAT, {"model": "m", "messages": [user("word " * 50)]})).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
        assert "maximum context length is 20 tokens" in error["message"]


async def test_on_context_overflow_length_answers_an_empty_message(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        limits = {"max_context_tokens": 20, "on_context_overflow": "length"}
        await server.ok("/rl/start_session", {"session_id": "s", "limits": limits})
        reply = await server.chat([user("word " * 50)])
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
        assert reply["usage"]["completion_tokens"] == 0
        assert server.engine.requests == []


@pytest.mark.parametrize(
    ("limits", "turns", "param"),
    [
        ({"max_turns": 2}, 2, "limits.max_turns"),
        ({"max_total_tokens": 3}, 2, "limits.max_total_tokens"),
        ({"deadline_s": 0}, 0, "limits.deadline_s"),
    ],
)
async def test_a_used_up_limit_is_403_before_and_after_a_restart(
    tmp_path: Path, limits: dict[str, Any], turns: int, param: str
) -> None:
    async with serving(tmp_path, always(Reply(sampled("ok")))) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "limits": limits})
        for _ in range(turns):
            await server.chat([user("hi")])
        response = await server.post(CHAT, GOOD)
        assert (response.status_code, response.json()["error"]["param"]) == (403, param)
        assert response.json()["error"]["code"] == "session_limit_reached"
    async with serving(tmp_path, always()) as server:
        assert (await server.post(CHAT, GOOD)).status_code == 403


async def test_max_tokens_per_turn_limits_every_request(tmp_path: Path) -> None:
    async with serving(tmp_path, always(Reply(sampled("one two three four five")))) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "limits": {"max_tokens_per_turn": 2}})
        for asked in ({}, {"max_tokens": 100}, {"max_completion_tokens": 2}):
            reply = await server.chat([user("hi")], **asked)
            assert reply["usage"]["completion_tokens"] == 2
            assert reply["choices"][0]["finish_reason"] == "length"


async def test_failed_turns_consume_no_tokens_of_the_session_even_after_a_restart(tmp_path: Path) -> None:
    fails = Reply(sampled("long enough"), fault=Fault.ERROR, fault_after=1)
    async with serving(tmp_path, always(fails)) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "limits": {"max_total_tokens": 2}})
        for _ in range(3):
            assert (await server.post(CHAT, GOOD)).status_code == 502
    async with serving(tmp_path, always()) as server:
        assert (await server.post(CHAT, GOOD)).status_code == 200
