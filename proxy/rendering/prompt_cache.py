"""Remembers the ids of whole prompts by their exact content, so that rollouts which share a prompt render it once.

Nothing can go stale: the key holds all that a rendering depends on. Templates that read the clock are not remembered.
"""

from __future__ import annotations

import marshal
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from proxy.rendering.templates.chat_template import Options
from proxy.types import Ids, Message, Tool

# What a prompt takes for each of its tokens, about: its text, the ids and the objects around them.
_BYTES_A_TOKEN = 20


class PromptCache:
    """The prompts that were used last, `most_bytes` in all. Thread-safe."""

    def __init__(self, most_bytes: int = 32 * 2**20) -> None:
        self._room = most_bytes // _BYTES_A_TOKEN
        self._prompts: OrderedDict[Hashable, Ids] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Ids | None:
        """Return a copy of the ids, or None if the prompt is not remembered."""
        with self._lock:
            ids = self._prompts.get(key)
            if ids is None:
                return None
            self._prompts.move_to_end(key)
            return ids[:]

    def put(self, key: Hashable, ids: Ids) -> None:
        """Remember a copy of the ids, and forget the prompts that were not used for longest."""
        with self._lock:
            self._forget(key)
            self._prompts[key] = ids[:]
            self._room -= len(ids)
            while self._room < 0:
                self._forget(next(iter(self._prompts)))

    def _forget(self, key: Hashable) -> None:
        ids = self._prompts.pop(key, None)
        if ids is not None:
            self._room += len(ids)


def prompt_key(messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> Hashable | None:
    """Return the exact content of a conversation, None if it cannot be compared.

    `marshal` and `repr` tell apart what Python calls equal: 1, 1.0 and True, and dicts in another order.
    """
    try:
        offered = marshal.dumps([(tool.name, tool.description, tool.parameters) for tool in tools], 2)
    except ValueError:
        return None
    return tuple(messages), offered, repr(options)
