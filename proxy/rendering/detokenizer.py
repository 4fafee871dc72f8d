"""Sampled ids to text, piece by piece: joined pieces equal one decode of all ids, and a split character is held back.

Both kinds take time linear in the new ids, whatever came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Text of a growing run of ids. `flush` ends the run: an incomplete character becomes U+FFFD."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """For byte-level vocabularies: every token is some bytes, and text is their UTF-8 reading."""

    __slots__ = ("_decoder", "_piece")

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._piece, ids)))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class WindowDetokenizer:
    """For other vocabularies: decodes a short window, since a token's text may depend on the one before it.

    The window begins at the last point where the text was complete, so its length is that of a few tokens.
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
        # A character has at most four bytes: what is incomplete after that stays so.
        if text.endswith("\ufffd") and self._waits < 4:
            self._waits += 1
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._settle()
        return text

    def _new_text(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._done)
        return self._decode(self._done + self._pending)[len(before) :]

    def _settle(self) -> None:
        # Four tokens of context are more than any known decoder looks back.
        self._done = (self._done + self._pending)[-4:]
        self._pending = []
        self._waits = 0
