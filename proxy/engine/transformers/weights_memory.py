"""Moves weights between device memory and host memory, without changing their values.

Parameters and buffers stay the same objects, so all references to them (tied layers, modules) see the move. The weights
of a model on a CPU already are in host memory and stay there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def move_to_host(weights: Sequence[torch.Tensor], device: torch.device) -> None:
    """Copy the weights on `device` into host memory (pinned for CUDA, for a faster copy back), and free device memory.

    Raises RuntimeError if host memory is insufficient; all weights are then on `device` as before.
    """
    try:
        for tensor in weights:
            if tensor.device.type != "cpu":
                tensor.data = _host_copy(tensor.data)
    except RuntimeError:
        move_to_device(weights, device)
        raise


def move_to_device(weights: Iterable[torch.Tensor], device: torch.device) -> None:
    """Copy the weights back to `device`. Raises RuntimeError without memory; another call can then copy the rest."""
    for tensor in weights:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def return_freed_memory(device: torch.device) -> None:
    """Return freed memory of `device`, which torch keeps cached, to the system."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)
