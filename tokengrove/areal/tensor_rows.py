"""Batches of tensors, concatenated along their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokengrove.client.libraries import library

if TYPE_CHECKING:
    import torch


def concat_padded_tensors(tensor_dicts: Sequence[Mapping[str, Any]], pad_value: float = 0.0) -> dict[str, Any]:
    """Join batches of the same columns: tensors [B, ...] along their rows, padded to one shape, and lists.

    Other values are taken from the first batch. Padding follows the values: 0 in `attention_mask`, `pad_value` in other
    columns. Raises ValueError for batches with different columns, and InvalidRequest if torch is not installed.
    """
    names = list(tensor_dicts[0]) if tensor_dicts else []
    for batch in tensor_dicts:
        if set(batch) != set(names):
            raise ValueError(f"batches of different columns cannot be joined: {sorted(names)} and {sorted(batch)}")
    return {
        name: _joined([batch[name] for batch in tensor_dicts], 0.0 if name == "attention_mask" else pad_value)
        for name in names
    }


def _joined(values: Sequence[Any], pad_value: float) -> Any:
    torch = library("torch")
    if isinstance(values[0], torch.Tensor):
        sizes = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
        return torch.cat([_padded(value, sizes, pad_value) for value in values])
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    return values[0]


def _padded(rows: torch.Tensor, sizes: Sequence[int], pad_value: float) -> torch.Tensor:
    padded = rows.new_full((len(rows), *sizes), pad_value)
    padded[tuple(slice(size) for size in rows.shape)] = rows
    return padded
