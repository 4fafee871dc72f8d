"""Screenshots for clients that see: PNG files, drawn and written with the standard library alone."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from functools import cache

WIDTH, HEIGHT = 320, 200


@cache
def screenshot(number: int, compression: int = 9) -> bytes:
    """Return the picture `number`; another `compression` writes the same pixels as other bytes."""
    rows = b"".join(b"\0" + _row(number, y) for y in range(HEIGHT))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, compression)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _row(number: int, y: int) -> bytes:
    """A grey window with a bar whose place tells the picture."""
    ground = bytes((230, 232, 235))
    if y // 8 != number % 25:
        return ground * WIDTH
    return bytes((60, 90, 40 * number % 256)) * 200 + ground * (WIDTH - 200)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def base64_screenshot(number: int, compression: int = 9) -> str:
    return b64encode(screenshot(number, compression)).decode()
