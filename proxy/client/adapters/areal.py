"""What AReaL's `deserialize_interactions` gives to its workflows: by interaction id its tensors, reward and id.

With layout individual that is one entry an interaction, its reward the return; with concat one a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from proxy.client.values import Json, Sample


class Interaction(Protocol):
    """What of AReaL's `InteractionWithTokenLogpReward` a trajectory needs."""

    reward: float | None
    interaction_id: str
    _cache: dict[str, Any] | None


def interactions(samples: Iterable[Sample], *, torch: bool = False) -> dict[str, dict[str, Json]]:
    """`{id: {"tensor_dict": ..., "reward": float, "interaction_id": id}}`, in numpy or in torch.

    The tensors are those of `Sample.to_tensor_dict`, without `turn_ids`, which AReaL does not know.
    """
    return {sample.interaction_id: _entry(sample, torch) for sample in samples}


def fill(samples: Sequence[Sample], kind: type[Any]) -> dict[str, Any]:
    """The same as objects of AReaL's class, which is given as `kind`: it is made empty and filled, as AReaL does."""
    filled: dict[str, Any] = {}
    for name, entry in interactions(samples, torch=True).items():
        interaction: Interaction = kind()
        interaction._cache = entry["tensor_dict"]
        interaction.reward = entry["reward"]
        interaction.interaction_id = name
        filled[name] = interaction
    return filled


def _entry(sample: Sample, torch: bool) -> dict[str, Json]:
    tensors: dict[str, Any] = {**(sample.to_torch() if torch else sample.to_tensor_dict())}
    del tensors["turn_ids"]
    return {
        "tensor_dict": tensors,
        "reward": float(sample.rewards[0]),
        "interaction_id": sample.interaction_id,
    }
