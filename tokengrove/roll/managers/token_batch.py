"""Token ids in the shapes that managers exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokengrove.errors import InvalidRequest
from tokengrove.roll.values import DataProto


def lm_input_of(token_ids: Sequence[int], images: Sequence[str] = ()) -> DataProto:
    """A prompt: `input_ids`, `attention_mask` and `position_ids` (from 0), each int64 [1, L].

    `images`, which are URLs, are in `non_tensor_batch["multi_modal_data"]`, in the format of ROLL's collator:
    `{"multi_modal_data": {"image": images}}`.
    """
    ids = np.array([token_ids], np.int64)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
    if not images:
        return DataProto(batch)
    media = np.empty(1, dtype=object)
    media[0] = {"multi_modal_data": {"image": list(images)}}
    return DataProto(batch, {"multi_modal_data": media})


def images_of_input(lm_input: DataProto) -> list[Any]:
    """The images of a prompt that `lm_input_of` or ROLL's collator created."""
    found = lm_input.non_tensor_batch.get("multi_modal_data")
    media = {} if found is None else found[0].get("multi_modal_data") or {}
    return list(media.get("image") or ())


def token_ids_of(column: Any, name: str) -> list[int]:
    """The token ids of a column [1, L] or [L]: a tensor, an array, or lists. Raises InvalidRequest for several rows."""
    ids = np.asarray(column)
    if ids.ndim > 2 or (ids.ndim == 2 and len(ids) != 1):
        raise InvalidRequest(f"batch[{name!r}] has the shape {ids.shape}; it must have one row: [1, L]", param=name)
    return [int(token) for token in ids.reshape(-1)]
