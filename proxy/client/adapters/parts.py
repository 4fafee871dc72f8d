"""Where a sample's prompt ends: at its first sampled token, trained or not, so that a group shares its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.client.values import Json, Sample
from proxy.errors import InvalidRequest


def prompt_length(sample: Sample) -> int:
    """Tokens before the first that the model sampled. Raises InvalidRequest when it sampled none."""
    spans = [turn["span"] for turn in sample.turns if turn.get("span") is not None]
    starts = [int(start) for start, end in spans if end > start]
    trained = np.flatnonzero(sample.loss_mask)
    starts += [int(trained[0])] if len(trained) else []
    if not starts:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has no sampled token; leave it out")
    return min(starts)


def turn_of(sample: Sample) -> Mapping[str, Json]:
    """The one turn of a sample of layout individual. Raises InvalidRequest for any other."""
    if len(sample.interaction_ids) != 1:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has several turns; export with layout individual")
    return sample.turns[0] if sample.turns else {}


def group_of(sample: Sample) -> str:
    """The group that a sample is compared in: its session's group, else its task, else its session alone."""
    return sample.group_id or sample.task_id or sample.session_id


def objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """One object a sample, as DataProtos keep what is no tensor: [B]."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
