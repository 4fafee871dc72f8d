"""Splits sampled ids into lexemes: runs of text and marks (markers). The joined texts are the decoded output.

If the vocabulary has a token for a mark, only that token counts: the same text spelled with ordinary tokens is text.
Otherwise the mark is searched for in the text, and text that may begin a mark is held back. Marks that have a meaning
only inside tool calls are searched for only while `inside` is set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.tool_format import spelling_pattern


class Mark(StrEnum):
    """The meaning of a marker. INNER: a marker inside tool calls. HIDDEN: not text. END: an end-of-turn token."""

    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    CALL_OPEN = "call_open"
    CALL_CLOSE = "call_close"
    INNER = "inner"
    HIDDEN = "hidden"
    END = "end"


class Lexeme(NamedTuple):
    """A run of text or a mark.

    `position`: the number of tokens fed so far, this lexeme included. `tokens`: the number of tokens in this lexeme.
    A NamedTuple, because one is built per token, three times faster than a frozen dataclass.
    """

    text: str
    mark: Mark | None
    position: int
    tokens: int


class Marks:
    """The marks of one vocabulary, as tokens where it has them, otherwise as text.

    `spellings`: the marks to find, by their text. `inner`: marks inside tool calls. `ends`: the ids that end a turn.
    """

    def __init__(
        self, tokenizer: Tokenizer, spellings: Mapping[str, Mark], ends: Sequence[int], inner: Collection[str] = ()
    ) -> None:
        by_text = {text: (tokenizer.token_id(text), mark) for text, mark in spellings.items() if text}
        inner_ids = {text: tokenizer.token_id(text) for text in inner if text and text not in by_text}
        self.tokens = {token: mark for token, mark in by_text.values() if token is not None}
        self.tokens.update(dict.fromkeys(ends, Mark.END))
        self.inner_tokens = {token for token in inner_ids.values() if token is not None} - self.tokens.keys()
        self.all_tokens = self.inner_tokens | self.tokens.keys()
        outer = {text: mark for text, (token, mark) in by_text.items() if token is None}
        self.outside = _Spellings(outer)
        self.within = _Spellings({text: Mark.INNER for text, token in inner_ids.items() if token is None} | outer)


class Lexer:
    """Incremental lexer of one output.

    Where a mark or one of the stop strings `stop` may end, every token is a lexeme of its own, for exact positions.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Marks, stop: Sequence[str] = ()) -> None:
        self._marks = marks
        self._single = bool(stop or marks.outside.marks)
        self._last_bytes = _last_bytes(stop) if stop and not marks.outside.marks else None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._held = ""
        self._held_tokens = 0
        self.position = 0
        self.inside = False

    def run(self, ids: Sequence[int]) -> str | None:
        """Return the text of `ids` if they contain no mark or part of one. Else return None: `feed` must read them.

        Most of an output is read this way, and only C functions loop over the ids.
        """
        marks = self._marks
        searched = marks.within if self.inside else marks.outside
        if self._held_tokens or self._held or searched.marks or not marks.all_tokens.isdisjoint(ids):
            return None
        if self._single and len(ids) > 1 and self._may_end_in(ids):
            return None
        self.position += len(ids)
        return self._detokenizer.push(ids)

    def feed(self, ids: Sequence[int]) -> Iterator[Lexeme]:
        """Yield the lexemes that `ids` complete."""
        marks, inner, start = self._marks.tokens, self._marks.inner_tokens, 0
        for index, token in enumerate(ids):
            mark = marks.get(token)
            if mark is None and self.inside and token in inner:
                mark = Mark.INNER
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

    def _may_end_in(self, ids: Sequence[int]) -> bool:
        """Return whether a mark or a stop string may end in `ids`. A stop string ends in a token with its last byte."""
        return self._last_bytes is None or self._detokenizer.may_hold(ids, self._last_bytes)

    def flush(self) -> Iterator[Lexeme]:
        """Yield the text that was held back."""
        text = self._held + self._detokenizer.flush()
        if text or self._held_tokens:
            yield Lexeme(text, None, self.position, self._held_tokens)
        self._held, self._held_tokens = "", 0

    @property
    def _spellings(self) -> _Spellings:
        return self._marks.within if self.inside else self._marks.outside

    def _text(self, ids: Sequence[int]) -> Iterator[Lexeme]:
        self.position += len(ids)
        text = self._detokenizer.push(ids)
        if self._held or self._held_tokens or self._spellings.marks:
            self._held_tokens += len(ids)
            yield from self._find_spellings(self._held + text)
        else:
            yield Lexeme(text, None, self.position, len(ids))

    def _find_spellings(self, text: str) -> Iterator[Lexeme]:
        # The set of marks may change with every yielded lexeme, because the parser sets `inside`.
        while (found := self._spellings.find(text)) is not None:
            at, spelling, mark = found
            if at:
                yield self._release(text[:at], None)
            yield self._release(spelling, mark)
            text = text[at + len(spelling) :]
        keep = self._spellings.longest_start(text)
        self._held = text[len(text) - keep :]
        if keep < len(text):
            yield self._release(text[: len(text) - keep], None)

    def _release(self, text: str, mark: Mark | None) -> Lexeme:
        tokens, self._held_tokens = self._held_tokens, 0
        return Lexeme(text, mark, self.position, tokens)


class _Spellings:
    """Marks without a token of their own, which are searched for in the text."""

    def __init__(self, marks: Mapping[str, Mark]) -> None:
        self.marks = marks
        self._words = tuple(marks)
        self._pattern = spelling_pattern(self._words)
        self._firsts = {word[0] for word in self._words}

    def find(self, text: str) -> tuple[int, str, Mark] | None:
        found = self._pattern.search(text) if self._pattern is not None else None
        return None if found is None else (found.start(), found.group(), self.marks[found.group()])

    def longest_start(self, text: str) -> int:
        return 0 if self._firsts.isdisjoint(text) else longest_start(text, self._words)


def _last_bytes(stop: Sequence[str]) -> frozenset[int] | None:
    """Return the last byte of each stop string; None if a string ends with U+FFFD, which also replaces other bytes."""
    if any([word.endswith("\ufffd") for word in stop]):
        return None
    return frozenset([word.encode("utf-8", "surrogatepass")[-1] for word in stop if word])


def longest_start(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `words`."""
    longest = 0
    for word in words:
        at = text.find(word[0], max(0, len(text) - len(word) + 1))
        while 0 <= at < len(text) - longest:
            if word.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(word[0], at + 1)
    return longest
