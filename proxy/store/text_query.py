"""What a search for text wants: words and phrases, all of which a turn must have, in any case of letters.

A word is a run of letters and digits, so no character of a query has a meaning of its own in a database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

WORDS = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class TextQuery:
    """Phrases: words that follow each other. `foo.py` is the phrase of two words, like `"foo py"`."""

    phrases: tuple[tuple[str, ...], ...]

    @property
    def for_sqlite(self) -> str:
        """The query in the language of FTS5."""
        return " AND ".join('"' + " ".join(phrase) + '"' for phrase in self.phrases)

    @property
    def for_postgres(self) -> str:
        """The query in the language of `to_tsquery`."""
        return " & ".join("(" + " <-> ".join(f"'{word}'" for word in phrase) + ")" for phrase in self.phrases)


def parse_text(text: str) -> TextQuery | None:
    """The query of words and of phrases in double quotes; None if it has no word. A last quote may be missing."""
    found: list[list[str]] = []
    for at, part in enumerate(text.lower().split('"')):
        found += [WORDS.findall(part)] if at % 2 else map(WORDS.findall, part.split())
    phrases = tuple(dict.fromkeys(tuple(words) for words in found if words))
    return TextQuery(phrases) if phrases else None


@dataclass(frozen=True, slots=True)
class Snippet:
    """A part of a text on one line: the `match`, and what is before and after it."""

    before: str
    match: str
    after: str


_BESIDE = 60
_CUT = re.compile(r"\s+")


class Match(NamedTuple):
    """A turn that has what a search wants, and a part of its text."""

    interaction_id: str
    seq: int
    snippet: Snippet


def snippet_of(text: str, query: TextQuery) -> Snippet:
    """The part of a text around the first place of a phrase. Without one, the beginning, and no match."""
    found = min(filter(None, (_place(text, phrase) for phrase in query.phrases)), default=(0, 0))
    begin, end = found[0], min(found[1], found[0] + 2 * _BESIDE)
    before, after = text[max(begin - _BESIDE, 0) : begin], text[end : end + _BESIDE]
    return Snippet(*(_CUT.sub(" ", part) for part in (before, text[begin:end], after)))


def _place(text: str, phrase: tuple[str, ...]) -> tuple[int, int] | None:
    words = r"[\W_]+".join(map(re.escape, phrase))
    found = re.search(rf"(?<![^\W_]){words}(?![^\W_])", text, re.IGNORECASE)
    return None if found is None else found.span()
