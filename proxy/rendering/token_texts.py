"""The text of each token of a sequence, for people to read.

A character spelled by several tokens is the text of the first of them; the others continue it. The joined texts of all
tokens are therefore the text of the sequence. Bytes that are not UTF-8, such as the first half of a character at the
end of an output, are written as `\\xE2`, so that every token can be identified by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_CONTINUATION = range(0x80, 0xC0)
_LONGEST = 4


@dataclass(slots=True)
class Texts:
    """`texts`: one for each token. The other fields are indexes and ids. `continues`: indexes of tokens that only
    continue a character and have empty texts. `broken`: indexes of tokens with bytes that are not UTF-8. `special`: the
    ids of special tokens."""

    texts: list[str] = field(default_factory=list)
    continues: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    special: list[int] = field(default_factory=list)


class TokenTexts:
    """Spells tokens. `piece`: the UTF-8 bytes of a token, possibly part of a character. Thread-safe.

    The texts of tokens that consist of whole characters are cached by id, so memory is bounded by the vocabulary.
    """

    def __init__(self, piece: Callable[[int], bytes], is_special: Callable[[int], bool]) -> None:
        self._piece, self._is_special = piece, is_special
        self._whole: dict[int, str | None] = {}

    def of(self, ids: Sequence[int]) -> Texts:
        """The texts of a sequence."""
        found = Texts(special=sorted(number for number in set(ids) if self._is_special(number)))
        at = 0
        while at < len(ids):
            text = self._whole_text(ids[at])
            if text is None:
                end = self._end_of_character(ids, at)
                _spell(found, at, [self._piece(number) for number in ids[at:end]])
                at = end
            else:
                found.texts.append(text)
                at += 1
        return found

    def _whole_text(self, number: int) -> str | None:
        """The text of a token; None if it does not consist of whole characters."""
        if number not in self._whole:
            self._whole[number] = _decoded(self._piece(number))
        return self._whole[number]

    def _end_of_character(self, ids: Sequence[int], start: int) -> int:
        """The index after the token that ends the character begun in the token at `start`."""
        data, end = self._piece(ids[start]), start + 1
        while end < len(ids) and _lacks(data):
            data, end = data[-_LONGEST:] + self._piece(ids[end]), end + 1
        return end


def _spell(found: Texts, first: int, pieces: Sequence[bytes]) -> None:
    """Append the texts of tokens. `first`: the index of the first token."""
    data = b"".join(pieces)
    owners = [owner for owner, piece in enumerate(pieces) for _ in piece]
    texts, broken, at = [""] * len(pieces), set(), 0
    while at < len(data):
        character = _decoded(data[at : at + _width(data[at])])
        if character is None:
            broken.add(owners[at])
            texts[owners[at]] += f"\\x{data[at]:02X}"
            at += 1
        else:
            texts[owners[at]] += character
            at += _width(data[at])
    found.continues += [first + owner for owner, piece in enumerate(pieces) if piece and not texts[owner]]
    found.broken += [first + owner for owner in sorted(broken)]
    found.texts += texts


def _lacks(data: bytes) -> bool:
    """Whether these bytes end with an incomplete character."""
    for back in range(1, min(_LONGEST, len(data) + 1)):
        byte = data[-back]
        if byte not in _CONTINUATION:
            return _width(byte) > back
    return False


def _width(lead: int) -> int:
    """The number of bytes of a character with this first byte; 1 for bytes that begin no character."""
    return 2 if 0xC2 <= lead <= 0xDF else 3 if 0xE0 <= lead <= 0xEF else 4 if 0xF0 <= lead <= 0xF4 else 1


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
