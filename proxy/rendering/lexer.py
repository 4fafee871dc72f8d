"""Sampled ids to lexemes: runs of text and marks. Joined, the texts of all lexemes are the decoded output.

A mark is found by its token id where the vocabulary has one, and only there: the same text spelled with ordinary
tokens is text. Where the vocabulary has none, the mark is found in the text, held back while it may be starting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from proxy.rendering.tokenizer import Tokenizer


class Mark(StrEnum):
    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    CALL_OPEN = "call_open"
    CALL_CLOSE = "call_close"
    END = "end"


@dataclass(frozen=True, slots=True)
class Lexeme:
    """`position`: tokens fed up to and with this one. `tokens`: how many of them are this lexeme's."""

    text: str
    mark: Mark | None
    position: int
    tokens: int


class Lexer:
    """`spellings` are the marks to find, by their text; `ends` the ids that end a turn.

    With `single` every token is a lexeme of its own, so that positions are exact.
    """

    def __init__(
        self, tokenizer: Tokenizer, spellings: Mapping[str, Mark], ends: Sequence[int], *, single: bool
    ) -> None:
        by_text = {text: (tokenizer.token_id(text), mark) for text, mark in spellings.items()}
        self._marks = {token: mark for token, mark in by_text.values() if token is not None}
        self._marks.update(dict.fromkeys(ends, Mark.END))
        self._spellings = {text: mark for text, (token, mark) in by_text.items() if token is None}
        self._single = single or bool(self._spellings)
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._held = ""
        self._held_tokens = 0
        self.position = 0

    def feed(self, ids: Sequence[int]) -> Iterator[Lexeme]:
        marks, start = self._marks, 0
        for index, token in enumerate(ids):
            mark = marks.get(token)
            if mark is None:
                if self._single:
                    yield from self._text(ids[index : index + 1])
                    start = index + 1
                continue
            if start < index:
                yield from self._text(ids[start:index])
            yield from self.flush()
            self.position += 1
            yield Lexeme(self._tokenizer.piece(token).decode("utf-8", "replace"), mark, self.position, 1)
            start = index + 1
        if start < len(ids):
            yield from self._text(ids[start:])

    def flush(self) -> Iterator[Lexeme]:
        """What was held back, as text."""
        text = self._held + self._detokenizer.flush()
        if text or self._held_tokens:
            yield Lexeme(text, None, self.position, self._held_tokens)
        self._held, self._held_tokens = "", 0

    def _text(self, ids: Sequence[int]) -> Iterator[Lexeme]:
        self.position += len(ids)
        text = self._detokenizer.push(ids)
        if self._spellings:
            self._held_tokens += len(ids)
            yield from self._find_spellings(self._held + text)
        else:
            yield Lexeme(text, None, self.position, len(ids))

    def _find_spellings(self, text: str) -> Iterator[Lexeme]:
        while found := min(((text.find(s), s) for s in self._spellings if s in text), default=None):
            at, spelling = found
            yield self._release(text[:at], None)
            yield self._release(spelling, self._spellings[spelling])
            text = text[at + len(spelling) :]
        keep = longest_start(text, self._spellings)
        self._held = text[len(text) - keep :]
        if keep < len(text):
            yield self._release(text[: len(text) - keep], None)

    def _release(self, text: str, mark: Mark | None) -> Lexeme:
        tokens, self._held_tokens = self._held_tokens, 0
        return Lexeme(text, mark, self.position, tokens)


def longest_start(text: str, words: Mapping[str, object] | Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `words` without being all of it."""
    limit = min(len(text), max(map(len, words), default=1) - 1)
    for size in range(limit, 0, -1):
        end = text[len(text) - size :]
        if any(len(word) > size and word.startswith(end) for word in words):
            return size
    return 0
