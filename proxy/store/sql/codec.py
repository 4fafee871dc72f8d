"""Encodes values as bytes. A decoded value equals the encoded one, except that JSON turns tuples into lists.

Token ids are little-endian int32, logprobs little-endian float32: 8 bytes per sampled token and 4 per prompt token,
plus the version runs. JSON is one letter followed by the text: `j` plain, `z` compressed by zlib. If orjson rejects a
value (lone surrogates, integers beyond 64 bits), the standard library encodes it, as `J` or `Z`. Empty values are NULL.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from proxy.types import Ids, Json, Logprobs
from tokengrove.errors import InvalidRequest

# Compressing smaller text costs more than writing it: a third of a commit, for rows that fill as many pages.
COMPRESS_ABOVE_BYTES = 4096
# For conversations, level 1 is about three times faster than the default and needs up to a fifth more bytes.
COMPRESSION_LEVEL = 1

JSON_COLUMNS = frozenset(
    (
        *("new_messages", "output", "tools", "template_options", "sampling", "versions", "spans", "notes", "asked"),
        *("images", "rewards", "turn_options", "limits", "metadata", "metrics"),
    )
)
"""The columns, of any table, that `encode_json` encodes."""

_BIG_ENDIAN = sys.byteorder == "big"


def encode_ids(ids: Ids) -> bytes:
    """Encode token ids, 4 bytes each."""
    return ids.tobytes() if ids.typecode == "i" and not _BIG_ENDIAN else _little_endian(ids, "i")


def decode_ids(data: bytes) -> Ids:
    """Decode what `encode_ids` returned."""
    return _array(data, "i")


def encode_floats(values: Logprobs) -> bytes:
    """Encode float32 values, 4 bytes each."""
    return values.tobytes() if values.typecode == "f" and not _BIG_ENDIAN else _little_endian(values, "f")


def decode_floats(data: bytes) -> Logprobs:
    """Decode what `encode_floats` returned."""
    return _array(data, "f")


def encode_json(value: Json) -> bytes | None:
    """Encode a JSON value; None for an empty list, tuple or mapping and for None. Raises InvalidRequest."""
    if not value and value not in (0, ""):
        return None
    letter, text = b"j", b""
    try:
        text = orjson.dumps(value, default=_plain)
    except TypeError:
        letter, text = b"J", _dump(value)
    if len(text) <= COMPRESS_ABOVE_BYTES:
        return letter + text
    return (b"z" if letter == b"j" else b"Z") + zlib.compress(text, COMPRESSION_LEVEL)


def encode_columns(row: dict[str, Any], names: Iterable[str]) -> None:
    """Replace the JSON values of a row with their encodings. Raises InvalidRequest."""
    for name in names:
        value = row[name]
        if not value:
            row[name] = None
            continue
        try:
            text = orjson.dumps(value, default=_plain)
        except TypeError:
            row[name] = encode_json(value)
            continue
        row[name] = b"j" + text if len(text) <= COMPRESS_ABOVE_BYTES else encode_json(value)


def decode_json(data: bytes | None, empty: Json = None) -> Json:
    """Decode what `encode_json` returned; `empty` for NULL."""
    if data is None:
        return empty
    letter = data[:1]
    text = zlib.decompress(data[1:]) if letter in b"zZ" else data[1:]
    return orjson.loads(text) if letter in b"jz" else json.loads(text)


def check_texts(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise InvalidRequest for texts that some database cannot store: with NUL or lone surrogates."""
    for name in names:
        text = values[name]
        if text is not None:
            if not text.isascii():
                _check_unicode(name, text)
            if "\0" in text:
                raise InvalidRequest(f"{name} holds a NUL character, which cannot be stored", param=name)


def clean_text(text: str | None) -> str | None:
    """Return the text of an error message with NUL and lone surrogates escaped, so that it can be stored."""
    if text is None:
        return None
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def check_finite(name: str, values: Iterable[float]) -> None:
    """Raise InvalidRequest for NaN and infinities, which databases and JSON would turn into null."""
    if not all(map(math.isfinite, values)):
        raise InvalidRequest(f"{name} must be finite", param=name)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds half a surrogate pair, which cannot be stored", param=name) from None


def _dump(value: Json) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), default=_plain).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a value cannot be stored as JSON: {error}") from None


def _plain(value: Any) -> Json:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _little_endian(values: array[Any], typecode: str) -> bytes:
    if values.typecode != typecode:
        raise InvalidRequest(f"tokens are array({typecode!r}), not array({values.typecode!r})")
    values = values[:]
    values.byteswap()
    return values.tobytes()


def _array(data: bytes, typecode: str) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if _BIG_ENDIAN:
        values.byteswap()
    return values
