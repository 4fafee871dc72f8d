"""What the records of a dump may take: neither a short file nor a short value says to how much it unpacks.

A record is read up to its limit, and what its JSON takes in memory is estimated before it is parsed: at most `TIMES` as
much as the limit. Packed columns are unpacked in parts and dropped, since those who read them later unpack them whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO

from tokengrove.errors import ConfigurationError

MAX_RECORD_BYTES = 256 * 2**20
"""Unless the operator says otherwise. A session is one record; its images are records of their own."""
TIMES = 4
_OPTION = "--max-record-bytes"
_VALUE_BYTES = 64  # about: an empty list in another one
_WIDE = 4  # bytes that each character of a text takes if one of them is far from ASCII
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

    `values`: by column. `owner`: whose they are. What cannot be unpacked is left to `tokengrove db check`.
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
    """Return about how much memory the values of a JSON text take, in bytes; seldom less than they do."""
    values = sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))
    width = 1 if text.isascii() and b"\\u" not in text else _WIDE
    return len(text) * width + values * _VALUE_BYTES
