"""Limits on the memory of dump records: a short file or value may unpack to many bytes.

A record is read up to its limit, and the memory of its JSON is estimated before it is parsed: at most `TIMES` the
limit. Packed columns are unpacked in parts as a check and dropped, because later readers unpack them as a whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO

from tokengrove.errors import ConfigurationError

MAX_RECORD_BYTES = 256 * 2**20
"""The default limit. A session is one record; each of its images and side columns is a separate record."""
TIMES = 4
_OPTION = "--max-record-bytes"
_VALUE_BYTES = 64  # approximate: an empty list in another list
_WIDE = 4  # bytes of each character of a text if one character is far from ASCII
_PART_BYTES = 2**20


def read_record(source: IO[bytes], number: int, name: str, most: int) -> bytes:
    """Return line `number` of the dump `name`; nothing at its end. Raises ConfigurationError if it is too large."""
    line = source.readline(most + 1)
    if len(line) > most:
        raise ConfigurationError(
            f"line {number} of {name} has more than {most} bytes, the most that a record may have ({_OPTION})"
        )
    if 2 * len(line) + _memory(line) > TIMES * most:  # the parser makes a copy of the line
        raise ConfigurationError(
            f"line {number} of {name} takes more than {TIMES * most} bytes of memory, {TIMES} times as much as a "
            f"record may have ({_OPTION} {most})"
        )
    return line


def check_packed(values: Mapping[str, bytes | None], owner: str, most: int) -> None:
    """Raise ConfigurationError for stored JSON that unpacks to more than `most` bytes, or takes far more memory.

    `values`: by column. `owner`: their owner, for the error. Values that cannot be unpacked are left to
    `tokengrove db check`.
    """
    for column, value in values.items():
        if value and value[:1] in b"zZ" and _unpacks_to_more(value[1:], most):
            raise ConfigurationError(
                f"{column} of {owner} unpacks to more than {most} bytes, the most that a record may have ({_OPTION})"
            )


def _unpacks_to_more(packed: bytes, most: int) -> bool:
    unpacker, size, memory = zlib.decompressobj(), 0, 0
    try:
        while packed and not unpacker.eof:
            part = unpacker.decompress(packed, _PART_BYTES)
            packed = unpacker.unconsumed_tail
            size, memory = size + len(part), memory + _memory(part)
            if size > most or memory > TIMES * most:
                return True
    except zlib.error:
        pass
    return False


def _memory(text: bytes) -> int:
    """Return the estimated memory of the values of a JSON text, in bytes. It is rarely too low."""
    values = sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))
    width = 1 if text.isascii() and b"\\u" not in text else _WIDE
    return len(text) * width + values * _VALUE_BYTES
