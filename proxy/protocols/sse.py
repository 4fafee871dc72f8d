"""Server-sent events as bytes. Each function returns a whole event, so no chunk of the stream ends inside one."""

from __future__ import annotations

from typing import Any

import orjson

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
# A comment line with a single newline: some clients' parsers report a complete comment block as an empty event.
KEEPALIVE = b": keepalive\n"


def data(payload: Any) -> bytes:
    """Return an unnamed event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def event(name: str, payload: Any) -> bytes:
    """Return a named event with a JSON payload."""
    return b"event: " + name.encode() + b"\n" + data(payload)


def cut(event: bytes, field: str) -> tuple[bytes, bytes]:
    """Split an encoded event around the value of its first field of this name, which is null.

    Events that differ only in this value are then joined from the two parts and the value. Text in JSON strings is
    never mistaken for the field, because its quotes are escaped.
    """
    key = b'"%b":' % field.encode()
    head, _, tail = event.partition(key + b"null")
    return head + key, tail
