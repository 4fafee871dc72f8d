"""What AReaL's `deserialize_interactions` gives to its workflows: by interaction id its tensors, reward and id.

With layout individual that is one entry an interaction, its reward the return; with concat one a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from proxy.client.tensors import to_torch
from proxy.client.values import Json, Sample


class ArealInteraction(Protocol):
    """What of AReaL's `InteractionWithTokenLogpReward` a trajectory needs."""

    reward: float | None
    interaction_id: str
    _cache: dict[str, Any] | None


def interactions(samples: Iterable[Sample], *, torch: bool = False) -> dict[str, dict[str, Json]]:
    """`{id: {"tensor_dict": ..., "reward": float, "interaction_id": id}}`, in numpy or in torch.

    The tensors are those of `Sample.to_tensor_dict` with integers as int64, as AReaL makes them, and without
    `turn_ids`, which it does not know.
    """
    return {sample.interaction_id: _entry(sample, torch) for sample in samples}


def fill(samples: Sequence[Sample], kind: type[Any]) -> dict[str, Any]:
    """The same as objects of AReaL's class, which is given as `kind`: it is made empty and filled, as AReaL does."""
    filled: dict[str, Any] = {}
    for name, entry in interactions(samples, torch=True).items():
        interaction: ArealInteraction = kind()
        interaction._cache = entry["tensor_dict"]
        interaction.reward = entry["reward"]
        interaction.interaction_id = name
        filled[name] = interaction
    return filled


def _entry(sample: Sample, torch: bool) -> dict[str, Json]:
    arrays = sample.to_tensor_dict()
    del arrays["turn_ids"]
    wide = {name: array.astype(np.int64) if array.dtype == np.int32 else array for name, array in arrays.items()}
    return {
        "tensor_dict": to_torch(wide) if torch else wide,
        "reward": float(sample.rewards[0]),
        "interaction_id": sample.interaction_id,
    }
