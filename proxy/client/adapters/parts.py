"""What several adapters derive from a sample. Its prompt ends at the first sampled token, trained or not, so all
samples of a group share their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.client.values import Json, Sample
from proxy.errors import InvalidRequest


def prompt_length(sample: Sample) -> int:
    """Number of tokens before the first sampled token. Raises InvalidRequest if none was sampled."""
    spans = [turn["span"] for turn in sample.turns if turn.get("span") is not None]
    starts = [int(start) for start, end in spans if end > start]
    trained = np.flatnonzero(sample.loss_mask)
    starts += [int(trained[0])] if len(trained) else []
    if not starts:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has no sampled token; remove it from the samples")
    return min(starts)


def turn_of(sample: Sample) -> Mapping[str, Json]:
    """The turn of a sample that has one turn. Raises InvalidRequest for a sample of several turns."""
    if len(sample.interaction_ids) != 1:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has several turns; export with layout='individual'")
    return sample.turns[0] if sample.turns else {}


def group_of(sample: Sample) -> str:
    """The group of a sample for advantages: its session's group, else its task, else its session."""
    return sample.group_id or sample.task_id or sample.session_id


def objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """An object array [B], one entry per sample, as a DataProto keeps values that are not tensors."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
