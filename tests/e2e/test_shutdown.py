"""A shutdown waits for running turns; it answers long polls at once, and waits for no client that stalls."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from proxy.api.long_polls import LongPolls
from tests.e2e.processes import Process, server_process, told_of_stop
from tests.e2e.stalling import stalled
from tests.exports import entries
from tests.support import user

LONG_S = 600
"""Far longer than the timeout of `Process.wait`."""


def ask(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request; its answer is read later by `answer`."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def answer(connection: http.client.HTTPConnection) -> Any:
    try:
        response = connection.getresponse()
        assert response.status == 200
        return json.loads(response.read())
    finally:
        connection.close()


def test_long_polls_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    with server_process(tmp_path, "--engine", "mailbox", "--shutdown-timeout-s", str(LONG_S)) as server:
        answer(ask(server.url, "/rl/start_session", {"task_id": "t", "session_id": "s"}))
        waiting = [
            ask(server.url, "/trajectories/claim", {"wait_s": LONG_S}),
            ask(server.url, "/trajectories/claim", {"wait_s": LONG_S, "export": {"format": "jsonl"}}),
            ask(server.url, "/export_trajectories", {"session_id": "s", "wait_s": LONG_S}),
            ask(server.url, "/mailbox/next", {"wait_s": LONG_S}),
            ask(server.url, "/mailbox/next", {"session_id": "s", "wait_s": LONG_S}),
        ]
        with urlopen(f"{server.url}/health") as health:  # the server reads it after the requests above
            assert health.status == 200
        server.terminate()
        claimed, exported, page, *letters = map(answer, waiting)
        assert claimed == {"sessions": [], "claim_id": None, "lease_until": None}
        assert exported == {"sessions": [], "cursor": None, "claim_id": None, "lease_until": None}
        assert (page["samples"], entries(page)["s"]["status"]) == ([], "active")
        assert letters == [{"status": "empty"}] * 2
        assert server.wait() == 0


ENDLESS = ("--engine", "scripted", "--engine-arg", "delay_s=600")


def test_clients_that_stall_do_not_hold_a_shutdown(tmp_path: Path) -> None:
    with server_process(tmp_path, "--engine", "scripted", "--shutdown-timeout-s", str(LONG_S)) as server:
        with stalled(server.url):
            server.terminate()
            assert server.wait() == 0
        assert "Traceback" not in server.output


@pytest.mark.parametrize("second", [False, True])
def test_turns_that_outlast_the_timeout_or_a_second_signal_end_without_a_traceback(
    tmp_path: Path, second: bool
) -> None:
    with server_process(tmp_path, *ENDLESS, "--shutdown-timeout-s", str(LONG_S if second else 0)) as server:
        body = {"model": "m", "messages": [user("hi")]}
        waiting = [
            ask(server.url, f"/{stream}/v1/chat/completions", {**body, "stream": stream}) for stream in (False, True)
        ]
        polling = ask(server.url, "/trajectories/claim", {"wait_s": LONG_S})  # answered at the first signal
        _until_running(server, len(waiting))
        server.terminate()
        answer(polling)
        if second:
            server.terminate()
        assert server.wait() == 0
        assert "Traceback" not in server.output
        assert told_of_stop(server) == [
            f"stopping: 2 turns, 3 connections, up to {LONG_S if second else 0} s",
            *(["stopping at once: a second signal came"] if second else []),
            "stopping: interrupted 2 turns",
            "stopped: 0 turns finished, 2 interrupted",
        ]
        for connection in waiting:
            with contextlib.closing(connection), connection.getresponse() as reply:
                assert reply.status == 503 and b"shutting down" in reply.read()


def _until_running(server: Process, turns: int) -> None:
    for _ in range(6000):
        with urlopen(f"{server.url}/metrics") as metrics:
            if f"tokengrove_in_flight {turns}.0\n" in metrics.read().decode():
                return
        time.sleep(0.01)
    raise AssertionError("the turns did not start within a minute")


async def test_a_long_poll_returns_its_result_raises_its_error_or_returns_none_at_the_end() -> None:
    async def gives(value: int) -> int:
        await asyncio.sleep(0)
        if value < 0:
            raise ValueError("negative")
        return value

    polls, cancelled = LongPolls(), asyncio.Event()

    async def never() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 0

    assert await polls.wait(gives(3)) == 3
    with pytest.raises(ValueError, match="negative"):
        await polls.wait(gives(-1))
    waiting = asyncio.ensure_future(polls.wait(never()))
    await asyncio.sleep(0)
    assert not (polls.ending or waiting.done())
    polls.end()
    assert (await waiting, cancelled.is_set(), polls.ending) == (None, True, True)
    cancelled.clear()
    assert await polls.wait(never()) is None
    left = asyncio.ensure_future(LongPolls().wait(never()))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
