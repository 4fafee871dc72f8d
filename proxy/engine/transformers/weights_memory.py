"""Weights move between the memory of their device and that of the host; their values never change by it.

Parameters and buffers stay the same objects, so whoever refers to them (tied layers, modules) sees the move. Weights of
a model on the CPU are in the host's memory already and stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def move_to_host(model: Any, device: torch.device) -> None:
    """Copy the weights on `device` into the host's memory (pinned for CUDA, which copies it back faster), and free it.

    Raises RuntimeError if the host lacks memory; all weights are then on `device` as before.
    """
    try:
        for tensor in _weights(model):
            if tensor.device.type != "cpu":
                tensor.data = _host_copy(tensor.data)
    except RuntimeError:
        move_to_device(model, device)
        raise


def move_to_device(model: Any, device: torch.device) -> None:
    """Copy the weights back to `device`. Raises RuntimeError if it lacks memory; another call then does the rest."""
    for tensor in _weights(model):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def return_freed_memory(device: torch.device) -> None:
    """Return freed memory of `device`, which torch keeps for itself, to the system."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _weights(model: Any) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)
