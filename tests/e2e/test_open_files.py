"""A server that may open few files: it takes what it may, and clients that stall lock nobody out."""

from __future__ import annotations

import json
import resource
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.request import Request, urlopen

from proxy.serving import server
from proxy.settings import Settings
from tests.e2e.processes import fork
from tests.e2e.stalling import STALLS, connect
from tests.support import user

FILES = 256


def serve(folder: Path, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES // 2, FILES))
    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{folder / 'few.db'}")
    server.run(settings, lambda _, url: pipe.send((url, resource.getrlimit(resource.RLIMIT_NOFILE))))


def test_silent_and_half_sent_requests_beyond_the_limit_of_files_lock_nobody_out(tmp_path: Path) -> None:
    ours, theirs = get_context("forkserver").Pipe()
    process = fork(serve, tmp_path, theirs)
    silent = []
    try:
        url, limits = ours.recv()
        assert limits == (FILES, FILES)
        for number in range(FILES + 50):
            silent.append(connect(url))
            silent[-1].sendall(STALLS[number % 2])
        for path in ("/health", "/metrics"):
            with urlopen(url + path) as reply:
                assert reply.status == 200
        body = json.dumps({"model": "m", "messages": [user("hi")]}).encode()
        turn = Request(f"{url}/s/v1/chat/completions", body, {"content-type": "application/json"})
        with urlopen(turn) as reply:
            assert json.load(reply)["choices"]
    finally:
        for connection in silent:
            connection.close()
        process.terminate()
        process.join()
    assert process.exitcode == 0
