"""Moves weights between device memory and host memory, without changing their values.

Parameters and buffers stay the same objects, so all references to them (tied layers, modules) see the move. The weights
of a model on a CPU already are in host memory and stay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def move_to_host(model: Any, device: torch.device) -> None:
    """Copy the weights on `device` into host memory (pinned for CUDA, for a faster copy back), and free device memory.

    Raises RuntimeError if host memory is insufficient; all weights are then on `device` as before.
    """
    try:
        for tensor in _weights(model):
            if tensor.device.type != "cpu":
                tensor.data = _host_copy(tensor.data)
    except RuntimeError:
        move_to_device(model, device)
        raise


def move_to_device(model: Any, device: torch.device) -> None:
    """Copy the weights back to `device`. Raises RuntimeError without memory; another call can then copy the rest."""
    for tensor in _weights(model):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def return_freed_memory(device: torch.device) -> None:
    """Return freed memory of `device`, which torch keeps cached, to the system."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _weights(model: Any) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)
