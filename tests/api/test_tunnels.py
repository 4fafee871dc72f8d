"""`--expose`: a program that makes the listener for agents reachable, is started again, and ends with the server."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.api.agent_listener import PROBE
from proxy.serving import tunnel
from tests.relays import __file__ as relay_file
from tests.support import real_server, user
from tokengrove.errors import ConfigurationError

ADMIN_KEY = "the-key-of-the-administrator"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
RELAY = f"{shlex.quote(sys.executable)} {shlex.quote(relay_file)} {{port}}"
BODY = {"model": "m", "messages": [user("hi")]}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENGROVE_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setattr(tunnel, "_AGAIN_S", 0.01)


def exposed(folder: Path, command: str = RELAY, **more: Any) -> Any:
    return real_server(folder, admin_key=ADMIN_KEY, expose=command, **more)


def base_url(url: str) -> str:
    """The address of a new session. A 503 tells that the tunnel is starting."""
    for _ in range(2000):
        answer = httpx.post(f"{url}/rl/start_session", json={"task_id": "t"}, headers=ADMIN)
        if answer.status_code != 503:
            return str(answer.json()["base_url"])
        assert answer.json()["error"]["code"] == "tunnel_unavailable" and answer.headers["x-should-retry"] == "true"
        time.sleep(0.01)
    raise AssertionError("the tunnel did not come back")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Returns what the tunnels have printed that matches a pattern."""
    with caplog.at_level(logging.DEBUG, logger="proxy.serving.tunnel"):
        yield lambda pattern: re.findall(pattern, "\n".join(str(record.args) for record in caplog.records))


def test_a_session_gets_the_url_of_the_tunnel_which_reaches_the_agents_endpoints_only(
    tmp_path: Path, said: Any
) -> None:
    with exposed(tmp_path) as url:
        base = base_url(url)
        assert base.startswith("http://127.0.0.1:") and not base.startswith(url)
        assert httpx.post(f"{base}/chat/completions", json=BODY).status_code == 200
        root = base.partition("/t-")[0]
        assert httpx.get(f"{root}/rl/sessions", headers=ADMIN).status_code == 404
        assert said("reachable under (http://[0-9.:]+)") == [root]
        assert said("key (.*?)'") == ["None"]
        (pid,) = said(r"process (\d+)")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_tunnel_that_ends_is_started_again_and_new_sessions_get_its_new_url(tmp_path: Path, said: Any) -> None:
    with exposed(tmp_path) as url:
        before = base_url(url)
        (pid,) = said(r"process (\d+)")
        os.kill(int(pid), signal.SIGKILL)
        while (after := base_url(url)).split("/t-")[0] == before.split("/t-")[0]:
            time.sleep(0.01)
        assert httpx.post(f"{after}/chat/completions", json=BODY).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.post(f"{before}/chat/completions", json=BODY)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("no-such-program {port}", "no-such-program is not installed"),
        ("sh -c 'echo no route for {port}; exit 3'", "ended with exit code 3 .* its last output: no route for [0-9]+"),
        ("sh -c 'echo see http://127.0.0.1:9/docs; sleep 600' {port}", "did not print a URL that reaches this server"),
        ("sh -c 'exec sleep 600' {port}", "within 1 s .--expose-timeout-s.; it printed nothing"),
    ],
)
def test_a_tunnel_that_cannot_start_ends_the_start_with_the_reason(tmp_path: Path, command: str, why: str) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"--expose: .*{why}"),
        exposed(tmp_path, command, expose_timeout_s=1.0),
    ):
        pass


def test_a_url_counts_only_if_this_server_answers_there(tmp_path: Path) -> None:
    """Another server of the same kind proves nothing."""
    (tmp_path / "other").mkdir()
    with real_server(tmp_path / "other", admin_key=ADMIN_KEY, agent_port=0) as other:
        elsewhere = base_url(other).partition("/t-")[0]
        assert httpx.get(f"{elsewhere}/health", params={PROBE: "0" * 32}).json().keys() == {"status", PROBE}
        command = f"sh -c 'echo {other} {elsewhere.replace('127.0.0.1', 'localhost')}9; exec sleep 600' {{port}}"
        with (
            pytest.raises(ConfigurationError, match="reaches this server"),
            exposed(tmp_path, command, expose_timeout_s=1.0),
        ):
            pass
