"""Server-sent events from bytes, as the standard of HTML defines them, and the values in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from proxy.upstream.failure import Failure
from tokengrove.errors import brief


class Event(NamedTuple):
    """An event. `name`: "" without a field `event`."""

    name: str
    data: bytes


class EventDecoder:
    """Splits bytes that arrive in any parts into events. Lines end with CR, LF or both; comments are skipped."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._name, self._data = "", list[bytes]()
        self._after_cr = self._begun = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take bytes and return the events that they complete."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")  # the second half of a line end
            self._after_cr = False
        if b"\n" not in data and b"\r" not in data:  # the parts of a long line are joined once
            self._rest.append(data)
            return
        self._after_cr = data.endswith(b"\r")
        text = b"".join([*self._rest, data])
        *lines, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = [rest]
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[Event]:
        """Return the event at the end of the bytes, whose empty line many servers leave out."""
        rest = b"".join(self._rest)
        self._rest = []
        if rest:
            yield from self._line(rest)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[Event]:
        if not self._begun:
            self._begun, line = True, line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            name, data = self._name, self._data
            self._name, self._data = "", []
            if data:
                yield Event(name, b"\n".join(data))
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")


def json_of(data: bytes) -> dict[str, Any]:
    """The JSON object of an event or of a whole answer. Raises Failure."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Failure("the external model sends something that is not JSON", brief(data)) from None
    if not isinstance(value, dict):
        raise Failure("the external model sends JSON that is no object", brief(value))
    return value


def object_in(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """The object at `name`; empty without one. Raises Failure for any other value."""
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Failure(f"the external model sends '{name}' that is no object", brief(value))
    return value


def objects_in(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The list of objects at `name`; empty without one. Raises Failure for any other value."""
    values = holder.get(name)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Failure(f"the external model sends '{name}' that is no list of objects", brief(values))
    return values


def text_in(holder: dict[str, Any], name: str) -> str:
    """The text at `name`; empty without one. Raises Failure for any other value."""
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Failure(f"the external model sends '{name}' that is no text", brief(value))
    return value


def count_in(holder: dict[str, Any], name: str) -> int | None:
    """The count at `name`; None for anything that is none: an answer does not fail because of its usage."""
    value = holder.get(name)
    return value if type(value) is int and value >= 0 else None
