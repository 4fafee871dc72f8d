"""A hash of an observation that tells states apart, also those of different types that are written alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np


def compute_object_hash(value: Any) -> str:
    """SHA-256 of a value and of all values within it, each with its type; 64 hex digits.

    The order of a mapping's entries and of a set's members counts for nothing, that of a sequence does. Arrays count
    with dtype and shape, tensors as arrays, and objects of other types with their class and attributes.
    """
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """What is hashed of a value. Every part says how long it is, so that no two values have the same parts."""
    if value is None or isinstance(value, bool | int | float | complex):
        yield _part(type(value).__name__, repr(value).encode())
    elif isinstance(value, str):
        yield _part("str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        yield _part("bytes", bytes(value))
    elif isinstance(value, np.ndarray | np.generic):
        yield from _array_parts(np.asarray(value))
    elif isinstance(value, Mapping):
        yield from _unordered("dict", [(key, entry) for key, entry in value.items()])
    elif isinstance(value, AbstractSet):
        yield from _unordered("set", list(value))
    elif isinstance(value, list | tuple):
        yield _part(type(value).__name__, str(len(value)).encode())
        for entry in value:
            yield from _parts(entry)
    elif hasattr(value, "__array__"):
        yield from _array_parts(np.asarray(value))
    else:
        yield _part("object", type(value).__qualname__.encode())
        yield from _parts(vars(value) if hasattr(value, "__dict__") else repr(value))


def _array_parts(array: np.ndarray[Any, Any]) -> Iterator[bytes]:
    yield _part("array", f"{array.dtype} {array.shape}".encode())
    if array.dtype.hasobject:
        yield from _parts(array.ravel().tolist())
    else:
        yield _part("values", np.ascontiguousarray(array).tobytes())


def _unordered(kind: str, entries: list[Any]) -> Iterator[bytes]:
    yield _part(kind, "".join(sorted(compute_object_hash(entry) for entry in entries)).encode())


def _part(kind: str, content: bytes) -> bytes:
    return f"{kind} {len(content)}:".encode() + content
