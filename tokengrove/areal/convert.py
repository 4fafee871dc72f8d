"""Results as objects of AReaL's own class, for AReaL's trainer, which asks for that class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tokengrove.areal.interaction import InteractionWithTokenLogpReward
from tokengrove.client.libraries import library


def to_areal(interactions: Mapping[str, InteractionWithTokenLogpReward]) -> dict[str, Any]:
    """The same interactions, with their parents, as AReaL's `InteractionWithTokenLogpReward`.

    Fields that AReaL's class lacks are left out. The tensors are made here. Raises InvalidRequest without areal.
    """
    kinds = library("areal.experimental.openai.types")
    made: dict[int, Any] = {}
    return {name: _converted(interaction, kinds, made) for name, interaction in interactions.items()}


def _converted(interaction: InteractionWithTokenLogpReward, kinds: Any, made: dict[int, Any]) -> Any:
    """`made`: what was converted already, by the id of the object."""
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
    """The fields of `value` that the dataclass `kind` has too."""
    names = {field.name for field in fields(value)} & {field.name for field in fields(kind)}
    return {name: getattr(value, name) for name in names}
