"""Server-sent events: parses the bytes of a stream, in any pieces, into events with JSON data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import orjson

from tokengrove.client.values import Json
from tokengrove.errors import ProxyError

EventKind = Literal["statistics", "sessions"]


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """An event of the server. `data`: the data of `GET /rl/events` for this `kind`."""

    kind: str
    data: Json


class EventReader:
    """Reads events from the pieces of one stream.

    Lines end in a line feed, optionally after a carriage return, and in nothing else: JSON may contain any other line
    separator. Comments, `retry` and `id` are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._kind = ""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """Yield the events that end in this piece. Raises ProxyError for data that are not JSON."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._kind = value.decode(errors="replace")
        elif name == b"data":
            self._data.append(value)
        return None

    def _ended(self) -> ServerEvent | None:
        """The event before an empty line; None if it has no data."""
        kind, data = self._kind or "message", b"\n".join(self._data)
        self._kind, self._data = "", []
        if not data:
            return None
        try:
            return ServerEvent(kind, orjson.loads(data))
        except orjson.JSONDecodeError:
            raise ProxyError(f"the data of an event {kind!r} are not JSON; is it a tokengrove server?") from None
