"""Results as objects of AReaL's own class, which AReaL's trainer requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tokengrove.areal.interaction import InteractionWithTokenLogpReward
from tokengrove.client.libraries import library


def to_areal(interactions: Mapping[str, InteractionWithTokenLogpReward]) -> dict[str, Any]:
    """The same interactions, with their parents, as AReaL's `InteractionWithTokenLogpReward`.

    Fields that AReaL's class does not have are left out. The tensors are created here. Raises InvalidRequest if areal
    is not installed.
    """
    kinds = library("areal.experimental.openai.types")
    made: dict[int, Any] = {}
    return {name: _converted(interaction, kinds, made) for name, interaction in interactions.items()}


def _converted(interaction: InteractionWithTokenLogpReward, kinds: Any, made: dict[int, Any]) -> Any:
    """`made`: the converted interactions, by the `id()` of their originals."""
    if id(interaction) not in made:
        parent, response = interaction.parent, interaction.model_response
        given = {
            **_shared(interaction, kinds.InteractionWithTokenLogpReward),
            "parent": None if parent is None else _converted(parent, kinds, made),
            "model_response": response and kinds.ModelResponse(**_shared(response, kinds.ModelResponse)),
            "_cache": interaction.to_tensor_dict() if interaction.has_tensor_data else None,
        }
        made[id(interaction)] = kinds.InteractionWithTokenLogpReward(**given)
    return made[id(interaction)]


def _shared(value: Any, kind: Any) -> dict[str, Any]:
    """The fields of `value` that the dataclass `kind` also has."""
    names = {field.name for field in fields(value)} & {field.name for field in fields(kind)}
    return {name: getattr(value, name) for name in names}
