"""Lifts the images out of a JSON text before it is decoded.

The screenshots of a long session are nearly all of its bytes, and are sent again with every turn. Making strings of
them would hold the GIL for longer than all the rest of a turn. Therefore the texts of images stay in the body, and the
JSON that is decoded has short marks instead.
"""

from __future__ import annotations

import secrets

LEAST = 4096
"""Shorter texts are not lifted: that would save nothing."""

# The beginnings of JSON strings that are a data URL or the base64 text of a PNG, JPEG, GIF or WebP.
_BEGINNINGS = (b'"data:image/', b'"iVBORw0KGgo', b'"/9j/', b'"R0lGOD', b'"UklGR')


class Lifted:
    """`json`: the text with marks. Lifted strings are found by their marks, which no client can know."""

    __slots__ = ("_mark", "_texts", "json")

    def __init__(self, body: bytes) -> None:
        """Lift strings without escapes: their length in JSON is that of their text, and they end at the next quote."""
        self._mark = f"image {secrets.token_hex(16)} "
        spans = _spans(body)
        pieces: list[bytes | memoryview] = []
        view, end = memoryview(body), 0
        self._texts: list[memoryview] = []
        for start, stop in spans:
            pieces += (view[end:start], f'"{self._mark}{len(self._texts)}"'.encode())
            self._texts.append(view[start + 1 : stop - 1])
            end = stop
        self.json = b"".join([*pieces, view[end:]]) if spans else body

    def __len__(self) -> int:
        """The number of lifted strings."""
        return len(self._texts)

    def at(self, text: str) -> memoryview | None:
        """Return the string for a mark, as UTF-8; None for any other text."""
        return self._texts[int(text.removeprefix(self._mark))] if text.startswith(self._mark) else None


def _spans(body: bytes) -> list[tuple[int, int]]:
    """The places of strings to lift, quotes included. Text within a found image is not searched again."""
    spans: list[tuple[int, int]] = []
    gaps = [(0, len(body))]
    for beginning in _BEGINNINGS:
        rest: list[tuple[int, int]] = []
        for first, last in gaps:
            at = first
            while (start := body.find(beginning, at, last)) >= 0:
                stop = body.find(b'"', start + 1, last) + 1
                if not stop:
                    break
                # A quote after a backslash may be part of a text. Without a backslash, JSON has the string here.
                plain = body[start - 1 : start] != b"\\" and body.find(b"\\", start, stop) < 0
                if plain and stop - start >= LEAST:
                    spans.append((start, stop))
                    rest.append((first, start))
                    first = stop
                at = stop if plain else start + 1
            rest.append((first, last))
        gaps = rest
    return sorted(spans)
