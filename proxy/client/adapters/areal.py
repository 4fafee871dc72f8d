"""Samples in the form of AReaL's `deserialize_interactions`: by interaction id its tensors, reward and id.

Layout individual gives one entry per interaction, whose reward is its return; layout concat one per leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from proxy.client.tensors import to_torch
from proxy.client.values import Json, Sample


class ArealInteraction(Protocol):
    """The attributes of AReaL's `InteractionWithTokenLogpReward` that a trajectory needs."""

    reward: float | None
    interaction_id: str
    _cache: dict[str, Any] | None


def interactions(samples: Iterable[Sample], *, torch: bool = False) -> dict[str, dict[str, Json]]:
    """Return `{id: {"tensor_dict": ..., "reward": float, "interaction_id": id}}`, in numpy or in torch.

    The tensors are those of `Sample.to_tensor_dict` with integers as int64, as AReaL makes them, and without
    `turn_ids`, which AReaL does not know.
    """
    return {sample.interaction_id: _entry(sample, torch) for sample in samples}


def fill(samples: Sequence[Sample], kind: type[Any]) -> dict[str, Any]:
    """Return the same as objects of AReaL's class `kind`, each created empty and then filled, as AReaL does."""
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
