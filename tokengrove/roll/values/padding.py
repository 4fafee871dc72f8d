"""Tensors of a fixed length, for managers that create samples themselves."""

from __future__ import annotations

from typing import Any


def pad_to_length(tensor: Any, length: int, pad_value: Any, dim: int = -1) -> Any:
    """A torch tensor whose dimension `dim` has `length` elements: the first ones, then `pad_value`; same dtype."""
    import torch

    kept = tensor.narrow(dim, 0, min(length, tensor.size(dim)))
    shape = list(tensor.shape)
    shape[dim] = length - kept.size(dim)
    return torch.cat([kept, kept.new_full(shape, pad_value)], dim=dim)
