"""Clients that keep a server waiting: silent ones, half heads, uploads that stop."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit
from urllib.request import urlopen

_HEAD = b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
STALLS = (
    b"",
    b"POST /s/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-half: ",
    b"POST /s/v1/chat/completions" + _HEAD,
    b"POST /rl/start_session" + _HEAD,
    b"POST /rl/start_session HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 1000\r\n\r\n{",  # refused at once
)
"""What a client sends before it stalls."""


@contextmanager
def stalled(url: str, each: int = 5) -> Iterator[None]:
    """Hold `each` connections for each of `STALLS`, which the server has read."""
    with ExitStack() as stack:
        for sent in STALLS * each:
            connection = stack.enter_context(connect(url))
            connection.sendall(sent)
        with urlopen(f"{url}/health") as health:  # read after what came before it
            assert json.loads(health.read()) == {"status": "ok"}
        yield


def connect(url: str) -> socket.socket:
    """A connection to a server."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    return socket.create_connection((address.hostname, address.port), timeout=60)
