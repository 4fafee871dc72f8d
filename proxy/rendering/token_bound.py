"""A lower bound on the number of tokens of a text, found without encoding it: texts that cannot fit are refused early.

Every token spells some bytes of the text. If no token of the vocabulary contains two adjacent bytes of the text (or
four, eight and so on), some token ends between them, whatever the tokenizer does. Counting these places takes a few
milliseconds per megabyte, and the count never exceeds the number of tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

LONG = 200_000
"""Shorter texts, in characters, are encoded without a check: no text of this length takes long."""

_SLICE = 32_000
# Runs of 2, 4, 8 ... bytes, each with its own bit in the table. Few tokens are longer than the last.
_RUNS = tuple(2**power for power in range(1, 9))
_TABLE_BITS = 21
_MIX, _FACTOR = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
_SHIFT = np.uint32(32 - _TABLE_BITS)

_most: ContextVar[int | None] = ContextVar("most_tokens", default=None)


class TooManyTokens(Exception):
    """A text has more tokens than its caller can use: at least `fewest`."""

    def __init__(self, fewest: int) -> None:
        super().__init__(fewest)
        self.fewest = fewest


@contextmanager
def at_most(tokens: int) -> Iterator[None]:
    """In this block, encoding a long text that certainly has more tokens raises TooManyTokens."""
    token = _most.set(tokens)
    try:
        yield
    finally:
        _most.reset(token)


class TokenBound:
    """Bounds for one vocabulary. `pieces`: the bytes of each token, added tokens included.

    The bytes of the tokens of a text must equal the bytes of the text, in Unicode form NFC if `composed`. Thread-safe.
    """

    def __init__(self, pieces: Iterable[bytes], *, composed: bool) -> None:
        self._composed = composed
        spelled = [piece for piece in pieces if piece]
        lengths = np.array([len(piece) for piece in spelled])
        left = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())  # bytes to the end of the token
        self._table = np.zeros(2**_TABLE_BITS, np.uint8)
        for bit, (run, hashes) in enumerate(_hashes(np.frombuffer(b"".join(spelled), np.uint8))):
            known = np.unique(hashes[left[: len(hashes)] >= run])  # `|=` sets the bit once per place
            self._table[known] |= np.uint8(1 << bit)

    def check(self, text: str) -> None:
        """Raise TooManyTokens if the text certainly has more tokens than the block of `at_most` allows."""
        most = _most.get()
        if most is not None and (fewest := self.fewest(text, most)) > most:
            raise TooManyTokens(fewest)

    def fewest(self, text: str, enough: int) -> int:
        """Return a lower bound on the tokens of the text; the search stops at the first bound above `enough`."""
        count = 0
        for start in range(0, len(text), _SLICE):
            count += self._of_slice(text[start : start + _SLICE])
            if count > enough:
                break
        return count

    def _of_slice(self, text: str) -> int:
        ends = 0
        if self._composed and not text.isascii():
            text = unicodedata.normalize("NFC", text)
            ends = 2  # a character at either end may be composed with one outside the slice
        most = 0
        for bit, (run, hashes) in enumerate(_hashes(np.frombuffer(text.encode("utf-8", "replace"), np.uint8))):
            unknown = self._table[hashes] & np.uint8(1 << bit) == 0
            # If runs overlap in less than two bytes, each contains a token end of its own.
            step = run - 1
            whole = len(unknown) - len(unknown) % step
            most = max(most, int(unknown[:whole].reshape(-1, step).sum(axis=0).max()) if whole else 0)
        return max(most - ends, 0)


def _hashes(text: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yield each length of runs, and the place in the table of the run that begins at each byte."""
    mixed = text.astype(np.uint32)
    half = 1
    for run in _RUNS:
        if len(text) < run:
            return
        mixed = (mixed[:-half] * _FACTOR + mixed[half:]) * _MIX
        mixed ^= mixed >> np.uint32(15)
        yield run, mixed >> _SHIFT
        half = run
