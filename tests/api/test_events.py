"""GET /rl/events, over real sockets: what happens is told, and listeners cost and hold nobody."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from proxy.api import event_feed
from tests.support import real_server, user
from tokengrove.client import Client


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "_TICK_S", 0.02)
    monkeypatch.setattr(event_feed, "_SETTLE_S", 0.01)


def chat(url: str, session: str, text: str = "hi") -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [user(text)]}
    assert httpx.post(f"{url}/{session}/v1/chat/completions", json=body).status_code == 200


@contextmanager
def listening(url: str, **query: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of a server by name, with their data; the stream has begun."""
    with httpx.stream("GET", f"{url}/rl/events", params=query, timeout=30) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        lines = answer.iter_lines()
        assert next(lines) == "retry: 2000"
        yield _events(lines)


def _events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def until_changed(events: Iterator[tuple[str, Any]], session: str) -> None:
    next(said for name, said in events if name == "sessions" and session in said["changed"])


def test_every_change_of_a_session_is_told(tmp_path: Path) -> None:
    with real_server(tmp_path) as url, listening(url) as events:
        assert next(events)[0] == "statistics"
        chat(url, "a/1")
        until_changed(events, "a/1")
        for path, body in (
            ("rl/set_reward", {"reward": 1.0}),
            ("rl/mark", {"turn": 0, "trainable": False}),
            ("rl/end_session", {}),
        ):
            assert httpx.post(f"{url}/a/1/{path}", json=body).status_code == 200
            until_changed(events, "a/1")
        assert httpx.delete(f"{url}/rl/sessions/a/1").status_code == 200
        until_changed(events, "a/1")
        assert httpx.post(f"{url}/rl/start_session", json={"session_id": "b"}).status_code == 200
        until_changed(events, "b")


def test_the_statistics_that_are_told_grow(tmp_path: Path) -> None:
    with real_server(tmp_path) as url, Client(url) as client:
        chat(url, "a")
        told = (event.data for event in client.events(["statistics"]))
        assert next(said for said in told if said["turns"]["complete"] == 1)["history"]["every_s"] == 5
        chat(url, "a", "again")
        next(said for said in told if said["turns"]["complete"] == 2)
        told.close()
        assert client.statistics()["turns"]["complete"] == 2


def test_only_what_was_asked_for_comes(tmp_path: Path) -> None:
    with real_server(tmp_path) as url, listening(url, events="sessions") as events:
        chat(url, "a")
        name, said = next(events)
        assert (name, said["changed"]) == ("sessions", ["a"])


def test_the_stream_ends_when_the_server_stops(tmp_path: Path) -> None:
    with ExitStack() as listener:
        with real_server(tmp_path, shutdown_timeout_s=600) as url:
            events = listener.enter_context(listening(url, events="statistics"))
            assert next(events)[0] == "statistics"
        assert {name for name, _ in events} <= {"statistics"}  # and it is whole: httpx would raise


def test_one_listener_too_many_is_refused_and_there_is_room_when_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "MOST_LISTENERS", 2)
    with real_server(tmp_path) as url:
        with listening(url), listening(url):
            refused = httpx.get(f"{url}/rl/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "retry-after" in refused.headers
        while httpx.get(f"{url}/rl/events?events=x").status_code != 400:
            pass
        with listening(url) as events:
            next(events)


def test_a_listener_that_never_reads_holds_up_neither_turns_nor_other_listeners(tmp_path: Path) -> None:
    with real_server(tmp_path) as url, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        stalled.connect((address.hostname, address.port))
        stalled.sendall(f"GET /rl/events HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())
        with listening(url) as events:
            for number in range(5):
                chat(url, f"s{number}")
                until_changed(events, f"s{number}")
