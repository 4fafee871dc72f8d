"""Token ids in the shapes that managers hand each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from proxy.errors import InvalidRequest
from proxy.rollout.roll.values import DataProto


def lm_input_of(token_ids: Sequence[int]) -> DataProto:
    """A prompt: `input_ids`, `attention_mask` and `position_ids` (from 0), each int64 [1, L]."""
    ids = np.array([token_ids], np.int64)
    return DataProto({"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]})


def token_ids_of(column: Any, name: str) -> list[int]:
    """The token ids of a column [1, L] or [L]: a tensor, an array, or lists. Raises InvalidRequest for several rows."""
    ids = np.asarray(column)
    if ids.ndim > 2 or (ids.ndim == 2 and len(ids) != 1):
        raise InvalidRequest(f"batch[{name!r}] has the shape {ids.shape}, and it must have one row: [1, L]", param=name)
    return [int(token) for token in ids.reshape(-1)]
