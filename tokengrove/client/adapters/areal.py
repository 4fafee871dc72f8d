"""Samples as AReaL's `deserialize_interactions` returns them: tensors, reward and id of each interaction, by id.

Layout individual gives one entry per interaction, and its reward is the return. Layout concat gives one per leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tokengrove.client.adapters import parts, replay, vision
from tokengrove.client.adapters.parts import Annotation, messages_of, score_of, token_columns, weights
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.tensors import Array, to_torch
from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest


class ArealInteraction(Protocol):
    """The attributes of AReaL's `InteractionWithTokenLogpReward` that a trajectory needs."""

    reward: float | None
    interaction_id: str
    parent: ArealInteraction | None
    messages: list[Any]
    output_message_list: list[Any] | None
    _cache: dict[str, Any] | None


def interactions(
    samples: Iterable[Sample], *, torch: bool = False, columns: Iterable[str] = ()
) -> dict[str, dict[str, Json]]:
    """Return `{id: {"tensor_dict": ..., "reward": float, "interaction_id": id, ...}}`, in numpy or in torch.

    The tensors are those of `Sample.to_tensor_dict`, with integers as int64, as in AReaL, and without `turn_ids`, which
    AReaL does not have. `columns` adds columns to each entry: `weight` float32 [1]; `returns`, `token_rewards`,
    `advantages` and `step_advantages` float32 [1, L]. The last two must be in the export. Raises InvalidRequest for a
    column that the samples do not have.

    For samples of a vision model, the tensors include the fields of AReaL's vision workflow: `mm_token_type_ids` int64
    [1, L], 1 on the tokens of images, and `multi_modal_input`, a list of one dict: `pixel_values` and `image_grid_thw`,
    or empty without images. Raises InvalidRequest for a sample with images that was exported without
    `multi_modal_inputs`.

    In addition to AReaL's three fields, an entry has `parent` (the id of the previous turn, or None), `session_id`,
    `weight`, `advantage`, `session_score` and, if the export included messages, `messages` and `output_message_list`.
    """
    listed = list(samples)
    tensors, has_images = _tensors(listed, list(columns)), vision.has_vision(listed)
    return {
        sample.interaction_id: {
            "tensor_dict": {**(to_torch(arrays) if torch else arrays), **(_media(sample, torch) if has_images else {})},
            "reward": sample.reward,
            "interaction_id": sample.interaction_id,
            "parent": _parent(sample),
            "session_id": sample.session_id,
            "weight": sample.weight,
            "advantage": sample.advantage,
            "session_score": score_of(sample),
            **_conversation(sample),
        }
        for sample, arrays in zip(listed, tensors, strict=True)
    }


def fill(samples: Sequence[Sample], kind: type[Any], *, columns: Iterable[str] = ()) -> dict[str, Any]:
    """Return the entries as objects of AReaL's class `kind`, each created empty and then filled, as AReaL does.

    `parent` is the parent's object if the parent is among the samples, as in layout individual.
    """
    entries = interactions(samples, torch=True, columns=columns)
    filled: dict[str, Any] = {name: kind() for name in entries}
    for name, entry in entries.items():
        interaction: ArealInteraction = filled[name]
        interaction._cache = entry["tensor_dict"]
        interaction.reward = entry["reward"]
        interaction.interaction_id = name
        interaction.parent = filled.get(entry["parent"])
        if "messages" in entry:
            interaction.messages, interaction.output_message_list = entry["messages"], entry["output_message_list"]
    return filled


def annotation(samples: Sequence[Sample], batch: Mapping[str, Any]) -> Annotation:
    """Arguments of `client.annotate` from AReaL's batch, with one row per sample in their order, before the update.

    Streams from float32 [B, L], whose column t is for token t + 1, as AReaL's actors compute them: `logprobs`
    (`prox_logp`), `ref_logprobs` (`ref_logp`), `advantages`. Raises InvalidRequest without any of these.
    """
    names = {"prox_logp": "logprobs", "ref_logp": "ref_logprobs", "advantages": "advantages"}
    return parts.annotation(samples, batch, names, "next")


def routed_experts(sample: Sample, end: int, on_missing: OnMissing = "refuse") -> Array | None:
    """The experts of the first `end` tokens, a whole turn, as AReaL's `ModelResponse` has them; None without experts.

    int32 [end - 1, layers * k]: the last token is in no forward pass of its turn. AReaL has no value for a missing row:
    it raises InvalidRequest, or with `on_missing` leave_out, gives None.
    """
    experts = replay.recorded_experts(sample)
    if experts is None:
        return None
    found = replay.first_rows(experts[: end - 1])
    if len(found) == end - 1:
        return found.reshape(end - 1, -1).astype(np.int32)
    if on_missing == "refuse":
        raise InvalidRequest(
            f"sample {sample.interaction_id!r} has not all experts of a turn of {end} tokens: token {len(found)} has "
            "no row; give on_missing='leave_out' to have no experts for such turns",
            param="on_missing",
        )
    return None


def _media(sample: Sample, torch: bool) -> dict[str, Any]:
    inputs = vision.tensors(sample) if torch else vision.arrays(sample)
    types = {"mm_token_type_ids": vision.token_types(sample)[None]}
    return {**(to_torch(types) if torch else types), "multi_modal_input": [inputs]}


def _tensors(samples: Sequence[Sample], columns: Sequence[str]) -> list[dict[str, Array]]:
    more = {name: [values[None] for values in found] for name, found in token_columns(samples).items()}
    more["weight"] = [weight[None] for weight in weights(samples)]
    if samples and (missing := [name for name in columns if name not in more]):
        raise InvalidRequest(f"the samples have no column {missing[0]!r}; they have {', '.join(more)}", param="columns")
    return [{**_plain(sample), **{name: more[name][place] for name in columns}} for place, sample in enumerate(samples)]


def _plain(sample: Sample) -> dict[str, Array]:
    arrays = sample.to_tensor_dict()
    del arrays["turn_ids"]
    return {name: array.astype(np.int64) if array.dtype == np.int32 else array for name, array in arrays.items()}


def _parent(sample: Sample) -> str | None:
    parent: str | None = sample.turns[-1].get("parent_id") if sample.turns else None
    return parent


def _conversation(sample: Sample) -> dict[str, list[Json]]:
    told = messages_of(sample)
    return {"messages": told[:-1], "output_message_list": told[-1:]} if told else {}
