"""Batches of arrays: rows padded to one length, and numpy arrays as torch tensors or a TensorDict.

Nothing here depends on the meaning of a column, and no row is truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.libraries import library

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Array = NDArray[Any]


def pad_right(rows: Sequence[Array], dtype: type[np.generic], value: float, length: int | None = None) -> Array:
    """Rows of any lengths as one array [B, length], by default the length of the longest."""
    padded = np.full((len(rows), max(map(len, rows), default=0) if length is None else length), value, dtype)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


def pad_left(rows: Sequence[Array], dtype: type[np.generic], value: float, length: int | None = None) -> Array:
    """Like `pad_right`, with the padding before the rows."""
    reversed_rows = [row[::-1] for row in rows]
    return pad_right(reversed_rows, dtype, value, length)[:, ::-1].copy()


def to_torch(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Copy the arrays into tensors of the same dtypes. Raises InvalidRequest without torch."""
    torch = library("torch")
    return {name: torch.tensor(array) for name, array in arrays.items()}


def to_tensordict(arrays: Mapping[str, Array]) -> TensorDict:
    """Copy the arrays into a TensorDict of batch size [B]. Raises InvalidRequest without tensordict."""
    tensordict = library("tensordict")
    tensors = to_torch(arrays)
    size = next(iter(tensors.values())).shape[0] if tensors else 0
    result: TensorDict = tensordict.TensorDict(tensors, batch_size=[size])
    return result
