"""`tokengrove watch` and `show` as real commands: pipes, Ctrl-C, a server that stops and comes back, many workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import ROOT, interruptible, run, server_process
from tests.support import user
from tokengrove.client import Client, ServerEvent

SCRIPTED = ("--engine", "scripted", "--engine-arg", "play=agent")


@contextmanager
def watching(url: str, *flags: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A running `watch` with pipes; it is killed with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tokengrove", "watch", "--url", url, *flags]
    pipe = subprocess.PIPE
    with interruptible():
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def updates(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The updates that a command with --json prints, as they come."""
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)


def chat(url: str, session: str) -> None:
    body = {"model": "m", "max_tokens": 16, "messages": [user("Say exactly: one")]}
    assert httpx.post(f"{url}/{session}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_each_update_is_a_line_of_json_until_ctrl_c(tmp_path: Path) -> None:
    with (
        server_process(tmp_path, *SCRIPTED) as server,
        watching(server.url, "--json", folder=tmp_path) as it,
    ):
        told = updates(it)
        assert next(told)["event"] == "statistics"
        chat(server.url, "s")
        changed = next(update for update in told if update["event"] == "sessions")
        assert changed["changed"] == ["s"]
        counted = next(update for update in told if update["event"] == "statistics" and update["turns"]["complete"])
        assert counted["turns"]["complete"] == 1
        it.send_signal(signal.SIGINT)
        _, errors = it.communicate(timeout=60)
        assert (it.returncode, errors) == (130, "")


def test_a_reader_that_leaves_ends_it_without_a_word(tmp_path: Path) -> None:
    with server_process(tmp_path, *SCRIPTED) as server, watching(server.url, folder=tmp_path) as it:
        assert it.stdout is not None and it.stderr is not None
        assert "turns/s 0" in it.stdout.readline()
        it.stdout.close()
        assert it.wait(60) == 0
        assert it.stderr.read() == ""


def test_it_waits_for_a_server_that_stops_and_says_so_once(tmp_path: Path) -> None:
    with server_process(tmp_path, *SCRIPTED) as server:
        url = server.url
        with watching(url, "--json", folder=tmp_path) as it:
            told = updates(it)
            next(told)
            server.terminate()
            assert server.wait() == 0
            assert it.stderr is not None
            assert it.stderr.readline().endswith("; waiting until it is there again\n")
            with server_process(tmp_path, *SCRIPTED, "--port", url.rpartition(":")[2]) as again:
                assert again.url == url
                chat(url, "later")
                assert next(update for update in told if update["event"] == "statistics")["turns"]
                it.send_signal(signal.SIGINT)
                _, errors = it.communicate(timeout=60)
                assert (it.returncode, errors) == (130, "")


def test_once_prints_the_figures_of_now(tmp_path: Path) -> None:
    with server_process(tmp_path, *SCRIPTED) as server:
        chat(server.url, "s")
        line = run("watch", "--once", "--url", server.url, cwd=tmp_path)
        assert (line.returncode, line.stderr) == (0, "")
        assert "turns 1, failed 0" in line.stdout and line.stdout.count("\n") == 1
        told = json.loads(run("watch", "--once", "--json", "--url", server.url, cwd=tmp_path).stdout)
        assert (told["event"], told["turns"]["complete"]) == ("statistics", 1)


@pytest.mark.parametrize("flags", [("--url", "http://127.0.0.1:9"), ("--url", "nonsense")])
def test_a_wrong_url_is_one_line(tmp_path: Path, flags: tuple[str, ...]) -> None:
    for name in (("watch",), ("watch", "--json"), ("show",)):
        done = run(*name, *flags, cwd=tmp_path)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("tokengrove: ") and done.stderr.count("\n") == 1
        assert flags[1] in done.stderr


def test_sessions_are_listed_while_the_server_runs_and_after_it_was_killed(tmp_path: Path) -> None:
    flags = ("--database-url", f"sqlite:///{tmp_path / 'served.db'}")
    with server_process(tmp_path, *SCRIPTED) as server:
        chat(server.url, "s")
        running = run("show", "--json", *flags, cwd=tmp_path)
        served = run("show", "--json", "--url", server.url, cwd=tmp_path)
        server.kill()
    killed = run("show", "--json", *flags, cwd=tmp_path)
    assert json.loads(served.stdout)["session_id"] == "s"
    assert running.stdout == served.stdout == killed.stdout
    assert " s " in f" {run('show', *flags, cwd=tmp_path).stdout.splitlines()[1]} "


def test_every_worker_tells_what_any_of_them_did(tmp_path: Path, postgres_url: str) -> None:
    with (
        server_process(tmp_path, *SCRIPTED, "--workers", "2", database_url=postgres_url) as server,
        Client(server.url) as client,
    ):
        told = client.events()
        first = next(event for event in told if event.kind == "statistics")
        assert first.data["processes"] >= 2
        names = [f"s{number}" for number in range(6)]
        for name in names:
            chat(server.url, name)
        missing = set(names)
        counted: ServerEvent | None = None
        for event in told:
            if event.kind == "sessions":
                assert event.data["all"] is False
                missing -= set(event.data["changed"])
            elif event.data["turns"]["complete"] == len(names):
                counted = event
            if counted is not None and not missing:
                break
        listed = client.session_page(order="newest", include=["summary"])["sessions"]
        assert {entry["session_id"]: entry["summary"]["turns"] for entry in listed} == dict.fromkeys(names, 1)


def test_a_stop_of_the_server_ends_the_streams_of_its_workers(tmp_path: Path, postgres_url: str) -> None:
    with (
        server_process(tmp_path, *SCRIPTED, "--workers", "2", database_url=postgres_url) as server,
        Client(server.url) as client,
    ):
        told = client.events()
        next(told)
        server.terminate()
        assert {event.kind for event in told} <= {"statistics", "sessions"}
        assert server.wait() == 0
