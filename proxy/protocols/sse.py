"""Server-sent events as bytes. An event is written whole, so that a chunk of the stream never ends inside one."""

from __future__ import annotations

from typing import Any

import orjson

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
# One newline: a complete comment block would reach some clients' parsers as an empty event.
KEEPALIVE = b": keepalive\n"


def data(payload: Any) -> bytes:
    """An unnamed event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def event(name: str, payload: Any) -> bytes:
    """A named event with a JSON payload."""
    return b"event: " + name.encode() + b"\n" + data(payload)
