"""Incremental detokenization: the joined pieces equal one decode of all ids; an incomplete character is held back.

Both kinds take time linear in the number of new ids, however long the text before them is.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_WINDOW = 16
_LOOKS_BACK = 4  # tokens; no known decoder looks back that far if its text begins with a whole character


class Detokenizer(Protocol):
    """Decodes a growing sequence of ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""

    def flush(self) -> str:
        """End the sequence and return the rest; an incomplete character becomes U+FFFD."""

    def may_hold(self, ids: Sequence[int], wanted: frozenset[int]) -> bool:
        """Return False only if no byte in `wanted` is part of the text of `ids`."""


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
    """For other vocabularies: decodes a short window again, because a token's text may depend on the tokens before it.

    `_shown`: the number of characters of the window's text that were returned.
    """

    __slots__ = ("_decode", "_shown", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = whole = self._decode(self._window)
        held = 0
        # A character has at most four bytes, so at most three tokens wait for its end. More tokens are invalid.
        while text.endswith("\ufffd") and held < 3:
            held += 1
            text = self._decode(self._window[:-held])
        if text.endswith("\ufffd"):
            held, text = 0, whole
        return self._take(text) if held else self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def may_hold(self, ids: Sequence[int], wanted: frozenset[int]) -> bool:
        return True

    def _show(self, text: str) -> str:
        new = self._take(text)
        if len(self._window) > _WINDOW:
            self._cut(text)
        return new

    def _take(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _cut(self, text: str) -> None:
        """Drop the window except for its last tokens, cut between two characters. `text` is the window's text."""
        for count in range(_LOOKS_BACK, _LOOKS_BACK + 4):  # a character has at most four bytes
            last = self._window[-count:]
            alone = self._decode(last)
            if text.endswith(alone) and "\ufffd" not in alone:
                break
        self._window, self._shown = last, len(alone)
