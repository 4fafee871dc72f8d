"""A client that shuts down its sending side gets its answer from a real server; one that leaves deserts its turn."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.e2e.processes import server_process
from tests.e2e.stalling import connect
from tests.support import user


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    with urlopen(Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})) as reply:
        return json.load(reply)


def ask(url: str, session: str, *, stream: bool) -> socket.socket:
    """A connection that has sent a turn, and will send nothing more."""
    body = json.dumps({"model": "m", "messages": [user("hi")], "stream": stream}).encode()
    head = f"POST /{session}/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    connection = connect(url)
    connection.sendall(b"%scontent-length: %d\r\n\r\n%s" % (head.encode(), len(body), body))
    connection.shutdown(socket.SHUT_WR)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as file:
        return file.read()


def test_half_closed_clients_get_their_answers_and_those_that_leave_desert_their_turns(tmp_path: Path) -> None:
    with server_process(tmp_path, "--engine", "mailbox") as server:
        turns = {name: ask(server.url, name, stream=name == "stream") for name in ("unary", "stream", "gone")}
        letters: dict[str, Any] = {}
        while len(letters) < len(turns):  # one that is not answered may come again before the others have arrived
            letter = post(server.url, "/mailbox/next", {"wait_s": 60})
            letters[letter["session_id"]] = letter
        turns["gone"].close()
        shown: Any = {"interactions": []}
        while not shown["interactions"]:
            time.sleep(0.05)
            with urlopen(f"{server.url}/rl/sessions/gone") as reply:
                shown = json.load(reply)
        assert [turn["status"] for turn in shown["interactions"]] == ["aborted"]
        for session, letter in letters.items():
            if session != "gone":
                answer = {"request_id": letter["request_id"], "text": "the whole answer"}
                post(server.url, "/mailbox/deliver", answer)
        unary, streamed = read_all(turns["unary"]), read_all(turns["stream"])
        assert json.loads(unary.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "the whole answer"
        assert b"the whole answer" in streamed and streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
