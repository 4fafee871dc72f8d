"""Samples with replay columns, as an export returns them, for tests of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.samples import chain
from tokengrove.client import Sample
from tokengrove.client.tensors import Array

LAYERS, PER_TOKEN = 3, 2
VOCABULARY = 12


def experts(length: int, missing: Sequence[int] = (), dtype: type[np.unsignedinteger[Any]] = np.uint8) -> Array:
    """Different experts for each of `length` tokens, [length, LAYERS, PER_TOKEN], except for the missing ones."""
    rows = np.arange(length * LAYERS * PER_TOKEN).reshape(length, LAYERS, PER_TOKEN).astype(dtype)
    rows[list(missing)] = np.iinfo(dtype).max
    return rows


def kept(
    length: int, sets: Mapping[int, Sequence[int]], outside: Mapping[int, Sequence[int]] | None = None
) -> dict[str, Array]:
    """`kept_counts` and `kept_ids`: the sets of some tokens, and of others the ids outside of theirs."""
    counts, ids, outside = np.zeros(length, np.int32), [], outside or {}
    for token in range(length):
        if token in sets:
            counts[token] = len(sets[token])
            ids += sorted(sets[token])
        elif token in outside:
            counts[token] = -len(outside[token]) - 1
            ids += sorted(outside[token])
    return {"kept_counts": counts, "kept_ids": np.array(ids, np.uint16)}


def two_turns(**columns: Any) -> Sample:
    """Tokens 1 2 | 3 4 | 8 | 5 6: the second and fourth part are sampled and trained; L is 7. Logprob -id / 4."""
    return chain([([1, 2], [3, 4]), ([8], [5, 6])], rewards=[0.5, 1.0], group="g", **columns)


SETS = {2: [3, 7], 3: [1, 4, 9], 5: [5], 6: [0, 6]}
"""A set for each sampled token of `two_turns`."""
KEPT_LOGPROBS = np.array([np.nan, np.nan, -0.5, -0.25, np.nan, 0.0, -0.125], np.float32)


def replayed(**more: Any) -> Sample:
    """`two_turns` with experts of all tokens but the last, and the sets `SETS`."""
    return two_turns(
        **{"routed_experts": experts(7, [6]), **kept(7, SETS), "kept_logprobs": KEPT_LOGPROBS.copy(), **more}
    )
