"""The server that a run starts for itself: a process of its own, whose sessions stay in the run's folder."""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from proxy.commands import child_server
from proxy.settings import Settings
from tokengrove import Client
from tokengrove.errors import ConfigurationError, Forbidden
from tokengrove.rollout.own_server import LOG, asked_of, own_server
from tokengrove.rollout.retries import retried_here

pytestmark = pytest.mark.processes

SCRIPTED = {"engine": "scripted"}


def settings_of(given: dict[str, Any], folder: Path, model: str | None = None) -> Settings:
    return child_server.settings_of(**asked_of(given, folder, model))


def child_of_run(folder: Path) -> subprocess.Popen[str]:
    """A run that starts a server, prints its URL and its process, and hangs."""
    code = (
        "import sys, signal, tokengrove.rollout.own_server as own\n"
        "from pathlib import Path\n"
        "with own.own_server({'engine': 'scripted'}, Path(sys.argv[1])) as server:\n"
        "    print(server.url, flush=True)\n"
        "    signal.pause()\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def test_only_the_run_has_the_key_and_its_sessions_stay_in_the_folder(tmp_path: Path) -> None:
    with own_server(SCRIPTED, tmp_path / "run") as server, Client(server.url, server.admin_key) as client:
        with client.session("first") as session:
            session_id = session.session_id
        with Client(server.url, "another") as stranger, pytest.raises(Forbidden):
            stranger.sessions()
    assert "stopped" in (tmp_path / "run" / LOG).read_text()
    with closing(sqlite3.connect(tmp_path / "run" / "tokengrove.db")) as database:
        assert database.execute("SELECT session_id FROM sessions").fetchall() == [(session_id,)]


def test_a_server_whose_run_is_killed_stops_and_stores_everything(tmp_path: Path) -> None:
    run = child_of_run(tmp_path)
    assert run.stdout is not None
    assert run.stdout.readline().startswith("http://127.0.0.1:")
    [server] = [os.pidfd_open(int(child)) for child in children_of(run.pid)]
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    select.select([server], [], [])  # until it has ended
    os.close(server)
    assert "stopped: 0 turns finished" in (tmp_path / LOG).read_text()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="--engine nothing is unknown"),
        own_server({"engine": "nothing"}, tmp_path),
    ):
        pass


def test_a_server_that_dies_is_started_again_at_its_address_with_its_sessions(tmp_path: Path) -> None:
    with own_server(SCRIPTED, tmp_path) as server, Client(server.url, server.admin_key) as client:
        with client.session("kept") as session:
            pass
        [child] = [int(line) for line in children_of(os.getpid()) if b"child_server" in command_of(int(line))]
        os.kill(child, signal.SIGKILL)
        assert retried_here(lambda: client.session_tree(session.session_id), 60.0).outcome is None
    assert "stopped" in (tmp_path / LOG).read_text().splitlines()[-1]


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_settings_have_a_free_port_a_database_in_the_folder_and_a_key_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = settings_of({}, tmp_path), settings_of({}, tmp_path)
    assert first.port == 0
    assert first.database_url == f"sqlite:///{tmp_path}/tokengrove.db"
    assert first.admin_key and second.admin_key and first.admin_key != second.admin_key
    monkeypatch.setenv("TOKENGROVE_ADMIN_KEY", "of-the-variable")
    given = settings_of({"port": 8123, "database_url": "sqlite:///elsewhere.db", "engine_arg": ["a=b"]}, tmp_path)
    assert (given.port, given.database_url, given.admin_key) == (8123, "sqlite:///elsewhere.db", "of-the-variable")
    assert given.engine_arg == ("a=b",)


def test_the_model_of_the_runs_file_is_served_unless_a_model_or_an_engine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_of({}, tmp_path, "org/of-the-file").model == "org/of-the-file"
    assert settings_of({"model": "org/other"}, tmp_path, "org/of-the-file").model == "org/other"
    assert settings_of({"engine": "scripted"}, tmp_path, "org/of-the-file").model is None
    monkeypatch.setenv("TOKENGROVE_ENGINE", "scripted")
    assert settings_of({}, tmp_path, "org/of-the-file").model is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle": "x"}, "server.modle is no setting of the server; did you mean model?"),
        ({"port": "x"}, "server.port must be an integer"),
        ({"port": 70000}, "--port must be between 0 and 65535, not 70000"),
    ],
)
def test_wrong_settings_name_themselves(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        settings_of(settings, tmp_path)
    assert str(error.value).startswith(message)
