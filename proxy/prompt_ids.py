"""Token ids that grow turn by turn: the ids of a prompt, or of a prompt and its output.

A turn adds arrays to the ids of its parent. Both share a list of arrays, and values computed from each array are cached
next to it, so a turn of a long conversation computes only values of new arrays. The list only grows and its arrays
never change, so cached values never go stale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import orjson

from proxy.types import Ids, ids_of

_SLICE = 500
_COMMA = b","


@dataclass(slots=True, eq=False)
class _Shared:
    """Arrays, and cached values of the first of them. `json`: the ids of each, followed by a comma; 7 bytes per id.

    `largest`: the largest id up to the end of each array.
    """

    arrays: list[Ids] = field(default_factory=list)
    json: list[bytes] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)

    def first(self, count: int) -> _Shared:
        return _Shared(self.arrays[:count], self.json[:count], self.largest[:count])


class PromptIds:
    """Ids in consecutive arrays, which must not be changed. Use it on the event loop only. `length`: their number."""

    __slots__ = ("_count", "_joined", "_shared", "length")

    def __init__(self, *arrays: Ids) -> None:
        self._shared = _Shared(list(arrays))
        self._count, self.length = len(arrays), sum(map(len, arrays))
        self._joined: Ids | None = None

    def __len__(self) -> int:
        return self.length

    def extended(self, *arrays: Ids) -> PromptIds:
        """Return these ids and those of `arrays`. The first extension shares cached values; others copy the list."""
        shared = self._shared
        if len(shared.arrays) > self._count:
            shared = shared.first(self._count)
        shared.arrays += arrays
        longer = object.__new__(PromptIds)
        longer._shared, longer._count, longer._joined = shared, len(shared.arrays), None
        longer.length = self.length + sum(map(len, arrays))
        return longer

    def begins_with(self, other: PromptIds) -> bool:
        """Whether these ids begin with all arrays of `other`. Takes no time if they are the same arrays."""
        size = other._count
        return self._count >= size and self._shared.arrays[:size] == other._shared.arrays[:size]

    @property
    def joined(self) -> Ids:
        """All ids in one array."""
        if self._joined is None:
            arrays = self._shared.arrays[: self._count]
            self._joined = arrays[0] if len(arrays) == 1 else _join(arrays)
        return self._joined

    @property
    def last(self) -> Ids:
        """The last added array."""
        return self._shared.arrays[self._count - 1]

    @property
    def largest(self) -> int:
        """The largest id, -1 if there is none. A negative id counts as the unsigned number with the same 32 bits."""
        largest, arrays = self._shared.largest, self._shared.arrays
        for at in range(len(largest), self._count):
            largest.append(max(_largest(arrays[at]), largest[at - 1] if at else -1))
        return largest[self._count - 1] if self._count else -1

    def json(self) -> list[bytes]:
        """The ids as a JSON array, in parts."""
        shared = self._shared
        for array in shared.arrays[len(shared.json) : self._count]:
            shared.json.append(_json(array))
        parts = shared.json[: self._count]
        while parts and not parts[-1]:
            parts.pop()
        last = parts.pop().removesuffix(_COMMA) if parts else b""
        return [b"[", *parts, last, b"]"]

    def tail(self, count: int) -> Ids:
        """Return the last `count` ids, or all if there are fewer."""
        arrays, first, length = self._shared.arrays, self._count, 0
        if first and len(arrays[first - 1]) >= count > 0:
            return arrays[first - 1][-count:]
        while first and length < count:
            first -= 1
            length += len(arrays[first])
        return _join(arrays[first : self._count])[max(length - count, 0) :]


def _join(arrays: list[Ids]) -> Ids:
    ids = ids_of()
    ids.frombytes(b"".join(arrays))
    return ids


def _json(ids: Ids) -> bytes:
    if not ids:
        return b""
    return orjson.dumps(np.frombuffer(ids, np.int32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] + _COMMA


def _largest(ids: Ids) -> int:
    """Computed in slices: for more values, NumPy releases the GIL, and then waits for the threads of the store."""
    values = np.frombuffer(ids, np.uint32)  # a negative id wraps to a large one
    largest = -1
    for start in range(0, len(values), _SLICE):
        largest = max(largest, int(np.maximum.reduce(values[start : start + _SLICE])))
    return largest
