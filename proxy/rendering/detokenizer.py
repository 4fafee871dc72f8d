"""Incremental detokenization: the joined pieces equal one decode of all ids; an incomplete character is held back.

Both kinds take time linear in the number of new ids, whatever the length of the text before them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Decodes a growing sequence of ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""

    def flush(self) -> str:
        """End the sequence and return the rest; an incomplete character becomes U+FFFD."""

    def may_hold(self, ids: Sequence[int], wanted: frozenset[int]) -> bool:
        """Return False only if none of the bytes `wanted` is part of the text of `ids`."""


class ByteDetokenizer:
    """For byte-level vocabularies, where every token stands for bytes of UTF-8 text. `pieces`: the bytes of each id."""

    __slots__ = ("_piece", "_rest")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._piece = pieces.__getitem__
        self._rest = b""

    def push(self, ids: Sequence[int]) -> str:
        data = self._rest + b"".join(map(self._piece, ids))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        data, self._rest = self._rest, b""
        return data.decode("utf-8", "replace")

    def may_hold(self, ids: Sequence[int], wanted: frozenset[int]) -> bool:
        return not wanted.isdisjoint(b"".join(map(self._piece, ids)))


class WindowDetokenizer:
    """For other vocabularies: decodes a short window, because a token's text may depend on the tokens before it.

    The window begins where the text was last complete, so it is a few tokens long.
    """

    __slots__ = ("_decode", "_done", "_pending", "_waits")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._done: list[int] = []
        self._pending: list[int] = []
        self._waits = 0

    def push(self, ids: Sequence[int]) -> str:
        self._pending.extend(ids)
        text = self._new_text()
        # A character has at most four bytes: if it is still incomplete after that, it is invalid.
        if text.endswith("\ufffd") and self._waits < 4:
            self._waits += 1
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._settle()
        return text

    def may_hold(self, ids: Sequence[int], wanted: frozenset[int]) -> bool:
        return True

    def _new_text(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._done)
        return self._decode(self._done + self._pending)[len(before) :]

    def _settle(self) -> None:
        # No known decoder looks back as far as four tokens.
        self._done = (self._done + self._pending)[-4:]
        self._pending = []
        self._waits = 0
