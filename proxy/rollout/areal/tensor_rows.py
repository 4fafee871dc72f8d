"""Batches of tensors put one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from proxy.client.libraries import library

if TYPE_CHECKING:
    import torch


def concatenated(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join batches of the same columns: tensors [B, ...] along their rows, padded with zeros to one shape; lists too.

    Of any other value the first batch's is kept. Raises ValueError for batches of different columns.
    """
    names = list(batches[0]) if batches else []
    for batch in batches:
        if set(batch) != set(names):
            raise ValueError(f"batches of different columns cannot be joined: {sorted(names)} and {sorted(batch)}")
    return {name: _joined([batch[name] for batch in batches]) for name in names}


def _joined(values: Sequence[Any]) -> Any:
    torch = library("torch")
    if isinstance(values[0], torch.Tensor):
        sizes = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
        return torch.cat([_padded(value, sizes) for value in values])
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    return values[0]


def _padded(rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    padded = rows.new_zeros((len(rows), *sizes))
    padded[tuple(slice(size) for size in rows.shape)] = rows
    return padded
