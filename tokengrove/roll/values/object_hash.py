"""A hash of an observation, by which equal states are found. It equals ROLL's hash of the value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np


def compute_object_hash(value: Any) -> str:
    """SHA-256 of a value and all values within it, each after the name of its kind; 64 hex digits.

    The order of a mapping's entries and of a set's members does not matter, the order of a sequence does. Lists and
    tuples are equal. Arrays and tensors are hashed with dtype and shape. An object of another type, which ROLL rejects,
    is hashed with its class and its attributes, or with its `repr` if it has none.
    """
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if value is None:
        yield b"None:"
    elif isinstance(value, bool | np.bool_):
        yield f"bool:{bool(value)}".encode()
    elif isinstance(value, int | float):
        yield f"number:{value!s}".encode()
    elif isinstance(value, str):
        yield b"str:" + value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray):
        yield b"bytes:" + bytes(value)
    elif isinstance(value, np.generic):
        yield f"np_scalar:{value.item()!s}".encode()
    elif isinstance(value, np.ndarray):
        yield from _array_parts("ndarray", value, value)
    elif isinstance(value, list | tuple):
        yield from _between("sequence", value)
    elif isinstance(value, Mapping):
        entries = sorted(value.items(), key=lambda entry: str(entry[0]))
        yield from _between("dict", (each for entry in entries for each in entry))
    elif isinstance(value, AbstractSet):
        yield from _between("set", sorted(value, key=str))
    elif hasattr(value, "detach") and hasattr(value, "cpu"):
        on_cpu = value.detach().cpu()
        yield from _array_parts("tensor", on_cpu, on_cpu.numpy())
    else:
        yield f"object:{type(value).__qualname__}".encode()
        yield from _parts(vars(value) if hasattr(value, "__dict__") else repr(value))


def _array_parts(kind: str, named: Any, array: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """`named`: the object whose dtype and shape are hashed as its own library prints them."""
    yield f"{kind}:{named.dtype}{named.shape}".encode()
    if array.dtype.hasobject:
        yield from _parts(array.ravel().tolist())  # its bytes are addresses
    else:
        yield array.tobytes()


def _between(kind: str, members: Iterable[Any]) -> Iterator[bytes]:
    yield f"{kind}_start:".encode()
    for member in members:
        yield from _parts(member)
    yield f"{kind}_end:".encode()
