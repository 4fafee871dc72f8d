"""Where an interception server may run: in this process, behind an address, or in a process that it starts and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.settings import Settings
from tests.support import default_url, real_server, tiny_renderer, user
from tokengrove.client import ServerUnreachable
from tokengrove.errors import InvalidRequest, Unauthorized
from tokengrove.openenv import HarnessSessionFactory, InterceptionServer


def agent(task: Any, base_url: str, http_client: httpx.Client) -> str:
    answer = http_client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": [user("hi")]})
    return str(answer.json()["choices"][0]["message"]["content"])


def answered(server: InterceptionServer) -> str:
    session = HarnessSessionFactory(server, agent).create(task=None, rollout_id="r")
    try:
        intercept = session.next_request()
        assert intercept is not None
        session.deliver(intercept, "yes")
        assert session.next_request() is None
        return str(session.wait())
    finally:
        session.close()


def test_in_this_process_agents_reach_it_by_its_http_client(tmp_path: Path) -> None:
    settings = Settings(engine="mailbox", database_url=default_url(tmp_path), migrate=True, admin_key="the-admin-key")
    app = build_app(settings, renderer=tiny_renderer())
    with InterceptionServer(app=app, admin_key="the-admin-key") as server:
        assert answered(server) == "yes"


def test_one_that_runs_is_used_with_its_key(tmp_path: Path) -> None:
    with real_server(tmp_path, "mailbox", admin_key="the-admin-key", shutdown_timeout_s=0.0) as url:
        with InterceptionServer(url, "the-admin-key") as server:
            assert answered(server) == "yes"
        with InterceptionServer(url) as server, pytest.raises(Unauthorized):
            answered(server)


def test_without_an_address_it_runs_in_a_process_that_ends_with_it() -> None:
    with InterceptionServer() as server:
        url = server.client.url
        assert answered(server) == "yes"
        session = HarnessSessionFactory(server, agent).create(task=None, rollout_id="waits")
        assert session.next_request() is not None
        session.close()
    with InterceptionServer(url) as server, pytest.raises(ServerUnreachable):
        server.client.health()


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        InterceptionServer(flags=["--no-such-flag"])
    with pytest.raises(InvalidRequest, match="'flags' are for a server that is started here"):
        InterceptionServer("http://127.0.0.1:1", flags=["--model", "x"])
