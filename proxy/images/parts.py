"""The parts of image files that Pillow reads in Python, one after the other, before it knows whether it needs them.

Each takes a few microseconds, so a file of millions of empty parts would occupy a thread, and the GIL, for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

MOST_PARTS = 50_000
"""A PNG of 20 MB has about 2,500 if its encoder writes parts of 8 KB."""
_PNG, _JPEG, _GIF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8"
_SCAN = 0xDA
_EXTENSION, _PICTURE, _TRAILER = 0x21, 0x2C, 0x3B


def has_too_many_parts(data: bytes) -> bool:
    """Return whether a file has more than `MOST_PARTS`. WebP has none: Pillow does not read it in Python."""
    if data.startswith(_PNG):
        parts = png_parts(data)
    elif data.startswith(_JPEG):
        parts = _jpeg_parts(data)
    elif data.startswith(_GIF):
        parts = _gif_parts(data)
    else:
        return False
    return next(islice(parts, MOST_PARTS, None), None) is not None


def png_parts(data: bytes) -> Iterator[bytes]:
    """Yield the names of a PNG's chunks."""
    at = len(_PNG)
    while at + 8 <= len(data):
        yield data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _jpeg_parts(data: bytes) -> Iterator[bytes]:
    """Yield the markers before the pixels, and each byte between markers."""
    at = 2
    while at + 4 <= len(data):
        marker = data[at : at + 2]
        yield marker
        if marker[0] != 0xFF or marker[1] in (0x00, 0xFF):
            at += 1
        elif marker[1] == _SCAN:
            return
        else:
            bare = marker[1] == 0x01 or 0xD0 <= marker[1] <= 0xD9
            at += 2 if bare else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _gif_parts(data: bytes) -> Iterator[bytes]:
    """Yield the blocks before the first picture, and each byte that is not part of one."""
    at = 13 + (3 * 2 ** ((data[10] & 7) + 1) if len(data) > 10 and data[10] & 0x80 else 0)
    while at < len(data) and data[at] not in (_PICTURE, _TRAILER):
        yield data[at : at + 1]
        if data[at] != _EXTENSION:
            at += 1
            continue
        at += 2
        while at < len(data) and data[at]:
            yield data[at : at + 1]
            at += 1 + data[at]
        at += 1
