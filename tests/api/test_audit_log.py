"""Each control action leaves one line, by whomever it is tried, without keys and without lines of anybody's making."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from proxy.sessions.keys import fingerprint
from proxy.telemetry.log import AUDIT
from tests.logs import fields_of, lines_of
from tests.support import Server, says, serving, user
from tests.workers import workers_of

ADMIN = "the-admin-key"
KEY = {"authorization": f"Bearer {ADMIN}"}


class Lines:
    """The audit lines so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def all(self) -> list[str]:
        return lines_of(self._caplog, logger=AUDIT)

    def of(self, action: str) -> list[dict[str, Any]]:
        """The fields of the lines of an action, without the id of the request."""
        said = [dict(fields) for fields in fields_of(self._caplog, "audit") if fields["action"] == action]
        assert all(fields.pop("request_id") for fields in said)
        return [{name: value for name, value in fields.items() if name != "action"} for fields in said]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, AUDIT)
    return Lines(caplog)


def control_routes(server: Server) -> list[tuple[str, str]]:
    """Every route that changes the engine, replaces keys or deletes: all under /engine that are no GET, and others."""
    routes = [(r.path, method) for r in server.app.routes if isinstance(r, Route) for method in r.methods or ()]
    return [
        (path.replace("{session:path}", "s"), method)
        for path, method in routes
        if method == "DELETE" or (method == "POST" and (path.startswith("/engine/") or path.endswith("rotate_keys")))
    ]


async def test_every_control_action_leaves_one_line_also_if_it_is_refused(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN) as server:
        routes = control_routes(server)
        assert len(routes) >= 16
        for path, method in routes:
            before = len(lines.all())
            response = await server.http.request(method, path, headers={"authorization": "Bearer another-key"})
            assert response.status_code in (401, 403)
            (line,) = lines.all()[before:]
            assert f" by=key key={fingerprint('another-key')} " in line
            assert f" status={response.status_code} code={response.json()['error']['code']} " in line
            assert "another-key" not in line


async def test_a_line_says_what_was_done_by_whom_and_from_where(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, says("a"), admin_key=ADMIN) as server:
        started = await server.ok("/rl/start_session", {"session_id": "a/b"}, headers=KEY)
        control = {"authorization": f"Bearer {started['control_key']}"}
        await server.ok("/engine/update_weights", {"path": "/weights/7", "version": 7, "mode": "drain"}, headers=KEY)
        await server.ok("/rl/rotate_keys", {"keys": ["path", "agent"]}, headers=control)
        assert (await server.http.delete("/rl/sessions/a/b", headers=KEY)).status_code == 200
        assert (await server.http.delete("/rl/sessions/a/b", headers=KEY)).status_code == 404
        who = {"by": "admin", "key": fingerprint(ADMIN), "client": "127.0.0.1:123"}
        assert lines.of("engine.update_weights") == [
            {"path": "/weights/7", "version": 7, "mode": "drain", **who, "status": 200}
        ]
        (rotated,) = lines.of("keys.rotate")
        assert (rotated["session"], rotated["keys"], rotated["by"]) == ("a/b", ["agent", "path"], "key")
        deleted = {"session": "a/b", **who, "status": 200}
        assert lines.of("session.delete") == [deleted, {**deleted, "status": 404, "code": "session_not_found"}]


async def test_lines_name_no_key_and_no_text_of_a_conversation(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, says("the-answer"), admin_key=ADMIN) as server:
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=KEY)
        path = started["root_url"].removeprefix("http://t")
        await server.ok(f"{path}/v1/chat/completions", {"messages": [user("the-question")]})
        await server.ok(f"{path}/rl/rotate_keys", {}, headers={"x-api-key": started["control_key"]})
        url = "http://me:the-password@10.0.0.1:3000"
        await server.post("/engine/servers", {"url": url}, headers=KEY)
        await server.post("/engine/servers", {"url": "http://a", "more": "the-extra"}, headers=KEY)
        text = "\n".join(lines.all())
        assert "http://10.0.0.1:3000" in text
        secrets = [ADMIN, *(started[name] for name in ("api_key", "control_key")), path.rpartition("~")[2]]
        for secret in (*secrets, "the-question", "the-answer", "the-password", "the-extra"):
            assert secret not in text


@pytest.mark.parametrize("text", ["a\nforged", "a\r\x00\x1b[31m", 'a" status=200', "a\u2028b\u0085", "x" * 5000])
async def test_no_text_of_a_client_breaks_out_of_its_place(tmp_path: Path, lines: Lines, text: str) -> None:
    async with serving(tmp_path, says()) as server:
        await server.post("/engine/update_weights", {"path": text, "mode": "drain"})
        (line,) = lines.all()
        assert line.isascii() and line.isprintable() and len(line) < 500
        assert re.search(r" status=\d+( code=\w+)? request_id=\w+$", line)
        if len(text) < 200:
            assert lines.of("engine.update_weights")[0]["path"] == text


async def test_an_open_server_says_so_and_reads_leave_no_line(tmp_path: Path, lines: Lines) -> None:
    async with serving(tmp_path, says("a")) as server:
        await server.chat([user("hi")])
        for path in ("/engine", "/rl/sessions", "/rl/sessions/s"):
            await server.http.get(path)
        await server.ok("/s/rl/end_session", {"reward": 1.0})
        assert lines.all() == []
        await server.ok("/engine/pause_generation", {"mode": "abort"})
        (paused,) = lines.of("engine.pause_generation")
        assert (paused["by"], paused["mode"], "key" in paused) == ("open", "abort", False)


async def test_workers_write_one_line_with_the_client_that_asked(
    tmp_path: Path, postgres_url: str, lines: Lines
) -> None:
    async with workers_of(tmp_path, postgres_url, migrate=True) as two:
        for worker in (two[0], two[1]):
            await worker.ok("/engine/pause_generation", {"mode": "abort"})
            await worker.ok("/engine/continue_generation", {})
        assert [line["client"] for line in lines.of("engine.pause_generation")] == ["127.0.0.1:123"] * 2
        assert len(lines.all()) == 4
