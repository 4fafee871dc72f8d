"""Each answer names its request: by the id that the client chose if it is sane, in the header that the API's SDK reads.

Each request ends once, under the template of its route, with its status, its error and its session.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.engine.scripted.scripts import babble
from proxy.telemetry.http_request import UNMATCHED, HttpRequest
from tests.support import Server, says, serving, user
from tests.workers import workers_of

CHAT = "/s/v1/chat/completions"
OWN = "rollout-7/step:3"


def body_of(path: str, **more: Any) -> dict[str, Any]:
    asked = {"input": "hi"} if path.endswith("/responses") else {"messages": [user("hi")]}
    return {"model": "m", "max_tokens": 4, **asked, **more}


def name_of_header(path: str) -> str:
    return "request-id" if path.endswith("/messages") else "x-request-id"


def ended(server: Server) -> list[HttpRequest]:
    """The records of the requests that end from now on."""
    records: list[HttpRequest] = []
    server.app.on_end = records.append
    return records


@pytest.mark.parametrize("path", ["/s/v1/chat/completions", "/s/v1/responses", "/s/v1/messages", "/s/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_id_is_returned_with_answers_and_errors(tmp_path: Path, path: str, stream: bool) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        own = {"x-request-id": OWN}
        body = body_of(path, stream=stream) if not path.endswith("/completions") else {"prompt": "hi", "stream": stream}
        body = body_of(path, stream=stream) if "chat" in path else body
        good = await server.post(path, body, headers=own)
        bad = await server.post(path, {"model": "m", "messages": 1, "input": 1}, headers=own)
        assert (good.status_code, bad.status_code) == (200, 400), good.text
        for answer in (good, bad):
            assert answer.headers[name_of_header(path)] == OWN
            assert ("request-id" in answer.headers) != ("x-request-id" in answer.headers)
        if path.endswith("/messages"):
            assert bad.json()["request_id"] == OWN
        unnamed = await server.post(path, {**body, "user": "other"})
        assert unnamed.headers[name_of_header(path)].startswith("req_")


@pytest.mark.parametrize("wrong", ["", "two words", "x" * 201, "höhe", "tab\tid"])
async def test_an_id_that_could_break_a_header_or_a_line_is_replaced(tmp_path: Path, wrong: str) -> None:
    async with serving(tmp_path, says("one")) as server:
        records = ended(server)
        answer = await server.http.post(CHAT, json=body_of(CHAT), headers=[(b"x-request-id", wrong.encode())])
        assert answer.headers["x-request-id"].startswith("req_")
        assert records[0].client_id is None and records[0].id == answer.headers["x-request-id"]


SENT = {"/rl/start_session": {"task_id": "t"}}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/nothing", 404), ("PUT", "/health", 405), ("POST", "/rl/start_session", 200)],
)
async def test_control_routes_return_an_id_too(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with serving(tmp_path, says()) as server:
        for headers, expected in (({"x-request-id": OWN}, OWN), ({}, "req_")):
            answer = await server.http.request(method, path, headers=headers, json=SENT.get(path, {}))
            assert answer.status_code == status
            assert answer.headers["x-request-id"].startswith(expected)


async def test_a_request_ends_once_under_the_template_of_its_route(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        records = ended(server)
        await server.post("/a~secret/chat/completions", body_of(CHAT))
        await server.post("/s/v1/messages/count_tokens", body_of("/messages"))
        await server.post("/s/rl/set_reward", {"reward": 1})
        await server.http.get("/rl/sessions/s/interactions/nothing")
        await server.http.get("/nowhere~secret")
        await server.http.get("/health", headers={"host": "elsewhere.example"})
        assert [(r.method, r.route, r.status, r.code) for r in records] == [
            ("POST", "/v1/chat/completions", 200, None),
            ("POST", "/v1/messages/count_tokens", 200, None),
            ("POST", "/{session}/rl/set_reward", 400, "invalid_request"),
            ("GET", "/rl/sessions/{session}/interactions/{interaction}", 404, "not_found"),
            ("GET", UNMATCHED, 404, "not_found"),
            ("GET", UNMATCHED, 403, "host_not_allowed"),
        ]
        assert all("secret" not in str(r.session) for r in records)
        assert records[2].session == "s"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_says_that_the_client_left(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, babble(8, 200, 1, delay_s=60.0)) as server:
        records = ended(server)
        await _leave(server, stream=stream)
        assert [(r.status, r.left) for r in records] == [(499, True)]


async def _leave(server: Server, *, stream: bool) -> None:
    """Ask for a turn and leave before its first token."""
    parts = [
        {"type": "http.request", "body": orjson.dumps(body_of(CHAT, stream=stream))},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(f"nobody reads {message}")

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    await server.app(scope, receive, send)


async def test_a_request_that_another_worker_answers_ends_there_alone(tmp_path: Path, postgres_url: str) -> None:
    async with workers_of(tmp_path, postgres_url, engine="mailbox") as workers:
        records: list[tuple[int, HttpRequest]] = []
        for number in range(2):
            workers[number].app.on_end = lambda record, number=number: records.append((number, record))
        await workers[1].http.post("/mailbox/next", json={"wait_s": 0})
        assert [(number, record.route, record.status) for number, record in records] == [(0, "/mailbox/next", 200)]


@pytest.mark.parametrize("path", ["/s/v1/chat/completions", "/s/v1/responses", "/s/v1/messages", "/s/v1/generate"])
async def test_the_clients_id_is_stored_with_its_turn(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9}} if "generate" in path else body_of(path)
        for headers in ({"x-request-id": OWN}, {}):
            assert (await server.post(path, {**body, "model": str(headers)}, headers=headers)).status_code == 200
        server.forget_sessions()
        assert [turn["notes"].get("request_id") for turn in await server.tree()] == [OWN, None]


async def test_equal_ids_make_no_retry_and_a_retry_needs_no_equal_ones(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        for _ in range(2):
            await server.post(CHAT, body_of(CHAT), headers={"x-request-id": OWN})
        assert len(await server.tree()) == 2
        retry = {"x-request-id": "another", "x-stainless-retry-count": "1"}
        assert (await server.post(CHAT, body_of(CHAT), headers=retry)).headers["x-request-id"] == "another"
        assert len(await server.tree()) == 2
