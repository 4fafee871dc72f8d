"""Samples as arrays with a batch dimension: numpy, and torch or tensordict where the caller asks for them.

Padding is on the right and never trained: mask 0, logprob 0, version and turn -1, attention False. Nothing is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from proxy.client.values import Sample

Array = NDArray[Any]

# Of each column its dtype and what stands in its padding; input_ids have the caller's pad token.
_COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "input_ids": (np.int32, 0),
    "loss_mask": (np.int32, 0),
    "logprobs": (np.float32, 0.0),
    "versions": (np.int32, -1),
    "turn_ids": (np.int32, -1),
    "attention_mask": (np.bool_, False),
}


def library(name: str) -> Any:
    """The package `name`, which only those need who ask for its types. Raises InvalidRequest, with the way out."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise InvalidRequest(f"this needs {package}: pip install {package}") from None


def tensor_dict(sample: Sample) -> dict[str, Array]:
    """One sample as AReaL's `to_tensor_dict`: `input_ids`, `loss_mask`, `versions` int32 [1, L], `logprobs` float32
    [1, L], `attention_mask` bool [1, L], `rewards` float32 [1]; and `turn_ids` int32 [1, L]."""
    return batch([sample], 0)


def batch(samples: Sequence[Sample], pad_token_id: int) -> dict[str, Array]:
    """All samples, padded to the longest: the columns of `tensor_dict` as [B, L], `rewards` [B]."""
    columns: dict[str, tuple[type[np.generic], float]] = {**_COLUMNS, "input_ids": (np.int32, pad_token_id)}
    arrays = {name: pad_right([getattr(s, name) for s in samples], *column) for name, column in columns.items()}
    return {**arrays, "rewards": np.array([s.rewards[0] for s in samples], np.float32)}


def pad_right(rows: Sequence[Array], dtype: type[np.generic], value: float, length: int | None = None) -> Array:
    """Rows of any lengths as one array [B, length], by default the length of the longest."""
    padded = np.full((len(rows), max(map(len, rows), default=0) if length is None else length), value, dtype)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


def pad_left(rows: Sequence[Array], dtype: type[np.generic], value: float, length: int | None = None) -> Array:
    """As `pad_right`, with the padding before the rows."""
    reversed_rows = [row[::-1] for row in rows]
    return pad_right(reversed_rows, dtype, value, length)[:, ::-1].copy()


def to_torch(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """The arrays as tensors of the same dtypes, which own their memory. Raises InvalidRequest without torch."""
    torch = library("torch")
    return {name: torch.tensor(array) for name, array in arrays.items()}


def to_tensordict(arrays: Mapping[str, Array]) -> TensorDict:
    """The arrays as a TensorDict of batch size [B]. Raises InvalidRequest without tensordict."""
    tensordict = library("tensordict")
    tensors = to_torch(arrays)
    size = next(iter(tensors.values())).shape[0] if tensors else 0
    result: TensorDict = tensordict.TensorDict(tensors, batch_size=[size])
    return result
