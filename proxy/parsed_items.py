"""Parser states after the items of a session's latest bodies, which are the messages of a conversation.

An agent sends its whole history with every turn. If a body begins with the items of an earlier body, byte for byte as
JSON, only the rest is parsed. A cached state depends only on these bytes, so it never goes stale.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import orjson
from xxhash import xxh3_128_digest

from proxy.types import Api, ImagePart

FEWEST = 64
"""Fewer items are parsed again, because that takes no longer than a lookup."""

# An agent and its sub-agents may take turns in one session; each conversation has two states.
_KEPT = 8
# The second state is this many items before the end: clients mark their last messages (`cache_control`), and siblings
# differ in them.
_TAIL = 8
# Larger bodies are not cached: conversations that fit a context are smaller, and refused ones must not stay in memory.
_MOST_BYTES = 8 * 2**20
_ENDS = b",]"
_MARK = secrets.token_hex(16)


class Copyable(Protocol):
    """The state of a parser after some items."""

    def copy(self) -> Self:
        """Return an equal state that shares nothing mutable."""


S = TypeVar("S", bound=Copyable)


class _Known(NamedTuple, Generic[S]):
    """A state after the first `items`. `size`, `digest`: of their JSON as an array, without the last bracket."""

    size: int
    digest: bytes
    items: int
    state: S

    def begins(self, array: memoryview) -> bool:
        """Whether the JSON of an array begins with these items."""
        size = self.size
        return size < len(array) and array[size] in _ENDS and xxh3_128_digest(array[:size]) == self.digest


class ParsedItems(Generic[S]):
    """The states of one API's parser after the items of the latest bodies. States must not be changed."""

    def __init__(self) -> None:
        self._kept: list[_Known[S]] = []

    def read(self, items: list[Any], state: S, parse: Callable[[S, list[Any], int], object]) -> S:
        """Return the state after all items, which must not be changed.

        `state`: the state before the first item. `parse(state, items, start)` advances a state from the item with index
        `start` to the end.
        """
        try:
            array = memoryview(orjson.dumps(items, _image_json))
        except orjson.JSONEncodeError:  # nested too deeply for orjson
            parse(state, items, 0)
            return state
        if len(array) > _MOST_BYTES:
            parse(state, items, 0)
            return state
        known = [one for one in self._kept if one.begins(array)]
        kept = [one for one in self._kept if one not in known]
        start, middle, end = 0, len(items) - _TAIL, len(items)
        if known:
            base = max(known, key=attrgetter("items"))
            start, state = base.items, base.state.copy()
            kept.append(base)
        if start < middle:
            parse(state, items[:middle], start)
            size = len(array) - len(orjson.dumps(items[middle:], _image_json))
            kept[len(kept) - bool(known) :] = [_Known(size, xxh3_128_digest(array[:size]), middle, state.copy())]
            start = middle
        if start < end:
            parse(state, items, start)
            kept.append(_Known(len(array) - 1, xxh3_128_digest(array[:-1]), end, state))
        self._kept = kept[-_KEPT:]
        return state


def _image_json(image: object) -> Any:
    """An image whose source was read (`protocols.image_sources`), in a form that no client can write."""
    if isinstance(image, ImagePart):
        return {_MARK: [*image]}
    raise TypeError


ParsedBodies = dict[Api, ParsedItems[Any]]
"""The parsed items of one session. The state differs by API."""


def read_items(
    bodies: ParsedBodies | None, api: Api, items: list[Any], state: S, parse: Callable[[S, list[Any], int], object]
) -> S:
    """Return the state after all items, which must not be changed. `state`, `parse`: see `ParsedItems.read`.

    `bodies`: the parsed items of earlier bodies of the session; without them, and for few items, all are parsed.
    """
    if bodies is None or len(items) < FEWEST:
        parse(state, items, 0)
        return state
    known: ParsedItems[S] = bodies.setdefault(api, ParsedItems())
    return known.read(items, state, parse)
