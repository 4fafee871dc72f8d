"""Tools and leading system messages, of which many sessions have the same: they are in memory once.

Values are shared only if they are identical: written differently, or with keys in another order, they would give other
tokens.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import orjson

from proxy.types import Message, Tool

T = TypeVar("T")

_KEPT = 64
# Larger values are not shared: what is kept for others must not take much memory itself.
_MOST_BYTES = 64 * 1024


class _Latest(Generic[T]):
    """The latest values, by a key that tells different ones apart."""

    def __init__(self) -> None:
        self._kept: dict[object, T] = {}

    def shared(self, key: object, value: T) -> T:
        """The kept value that equals `value`, else `value` itself, which is kept from now on."""
        kept = self._kept.pop(key, value)
        if kept != value:
            kept = value
        self._kept[key] = kept
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return kept


_tools = _Latest[tuple[Tool, ...]]()
_messages = _Latest[tuple[Message, ...]]()


def shared_tools(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Identical tools, if they are among the latest. They must not be changed."""
    if not tools:
        return tools
    try:
        written = orjson.dumps([[each.name, each.description, each.parameters, each.strict] for each in tools])
    except orjson.JSONEncodeError:  # integers beyond 64 bits
        return tools
    return _tools.shared(written, tools) if len(written) <= _MOST_BYTES else tools


def shared_lead(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Identical leading messages, if they are among the latest."""
    if not messages or sum(len(message.content) for message in messages) > _MOST_BYTES:
        return messages
    return _messages.shared(messages, messages)
