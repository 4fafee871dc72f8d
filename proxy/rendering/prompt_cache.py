"""Caches the ids of whole prompts by their exact content, so that rollouts that share a prompt render it once.

Entries never go stale: the key contains everything that a rendering depends on. Templates that read the clock are not
cached.
"""

from __future__ import annotations

import marshal
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from proxy.rendering.templates.chat_template import Options
from proxy.types import Ids, Message, Tool

_NO_TOOLS = marshal.dumps([], 2)
# The approximate memory per token of a prompt: the ids, its text and the objects around them.
_BYTES_A_TOKEN = 20


class PromptCache:
    """The most recently used prompts, at most `most_bytes` in all. Thread-safe."""

    def __init__(self, most_bytes: int = 32 * 2**20) -> None:
        self._most = self._room = most_bytes // _BYTES_A_TOKEN
        self._prompts: OrderedDict[Hashable, tuple[Ids, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Ids | None:
        """Return a copy of the ids, or None if the prompt is not cached."""
        with self._lock:
            found = self._prompts.get(key)
            if found is None:
                return None
            self._prompts.move_to_end(key)
            return found[0][:]

    def put(self, key: Hashable, ids: Ids, characters: int = 0) -> None:
        """Cache a copy of the ids, and drop the least recently used prompts.

        `characters`: the length of the text in the key, which may far exceed the ids: templates drop reasoning.
        """
        weight = max(len(ids), characters // _BYTES_A_TOKEN)
        with self._lock:
            if key in self._prompts:
                self._forget(key)
            self._prompts[key] = ids[:], weight
            self._room -= weight
            while self._room < 0:
                self._forget(next(iter(self._prompts)))

    def clear(self) -> None:
        """Drop all prompts."""
        with self._lock:
            self._prompts.clear()
            self._room = self._most

    def _forget(self, key: Hashable) -> None:
        found = self._prompts.pop(key, None)
        if found is not None:
            self._room += found[1]


def count_characters(messages: Sequence[Message]) -> int:
    """Return the approximate number of characters in the messages."""
    count = 0
    for message in messages:
        count += len(message.content) + len(message.reasoning or "")
        for call in message.tool_calls:
            count += len(call.arguments)
    return count


def prompt_key(messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> Hashable | None:
    """Return the exact content of a conversation; None if it cannot be compared.

    `marshal` and `repr` distinguish values that are equal in Python: 1, 1.0 and True, and dicts in another order.
    """
    if not tools:
        return tuple(messages), _NO_TOOLS, repr(options) if options else "{}"
    try:
        offered = marshal.dumps([(tool.name, tool.description, tool.parameters) for tool in tools], 2)
    except ValueError:
        return None
    return tuple(messages), offered, repr(options)
