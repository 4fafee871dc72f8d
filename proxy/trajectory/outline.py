"""A sample as runs of tokens instead of arrays, for people to look at: hundreds of bytes instead of megabytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.ledger import equal_runs
from proxy.trajectory.sample_row import MROPE, Labels, SampleRow
from tokengrove.reasons import RunKind

_KINDS = tuple(RunKind)
_CODE = {kind: code for code, kind in enumerate(_KINDS)}
_OF_TOKENS = frozenset(
    (
        *("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "attention_mask", "position_ids"),
        *("token_rewards", "unmasked_logprobs", MROPE),
        *("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"),
    )
)
"""The columns with one entry per token; an outline has runs instead."""


def outline(row: SampleRow) -> Labels:
    """The labels of a row, its columns without per-token entries, and `tokens` and `runs` instead of the other columns.

    `tokens`: the number of tokens. `runs`: lists [start, end, kind, turn] that cover all tokens. `turn`: the index in
    `turns` of the turn that sampled the tokens, or whose prompt added them; None: no turn. In layout forest, it is the
    index in `rows` of the sample that trains the tokens; None: they are context.
    """
    labels, columns = row.labels(), row.columns()
    if "row_ids" in columns:
        rest = {name: values for name, values in columns.items() if name.startswith("row_") and name != "row_ids"}
        return {**labels, **rest, "runs": _runs_of_rows(columns["row_ids"])}
    rest = {name: values for name, values in columns.items() if name not in _OF_TOKENS}
    return {**labels, **rest, "tokens": len(columns["input_ids"]), "runs": runs(labels["turns"], columns)}


def runs(turns: Sequence[Mapping[str, Any]], columns: Mapping[str, NDArray[Any]]) -> list[list[Any]]:
    """The runs of a sample with these `turns` (labels) and `columns`."""
    length = len(columns["input_ids"])
    kinds, owners = np.full(length, _CODE[RunKind.CONTEXT], np.int64), np.full(length, -1, np.int64)
    placed = sorted((tuple(turn["span"]), at) for at, turn in enumerate(turns) if turn["span"] is not None)
    before = 0
    for (start, end), at in placed:
        owners[before:end], kinds[start:end] = at, _CODE[RunKind.SAMPLED]
        before = end
    for start, end in _prompts([span for span, _ in placed], columns, length):
        kinds[start:end] = _CODE[RunKind.PROMPT]
    kinds[columns["loss_mask"] == 1] = _CODE[RunKind.TRAINED]
    padding = np.asarray(columns["attention_mask"]) == 0
    kinds[padding], owners[padding] = _CODE[RunKind.PADDING], -1
    return [
        [start, end, _KINDS[kinds[start]].value, None if owners[start] < 0 else int(owners[start])]
        for start, end in equal_runs(owners * len(_KINDS) + kinds)
    ]


def _runs_of_rows(rows: NDArray[Any]) -> list[list[Any]]:
    found = []
    for start, end in equal_runs(rows):
        row = int(rows[start])
        kind = RunKind.CONTEXT if row < 0 else RunKind.TRAINED
        found.append([start, end, kind.value, None if row < 0 else row])
    return found


def _prompts(
    spans: Sequence[tuple[int, int]], columns: Mapping[str, NDArray[Any]], length: int
) -> list[tuple[int, int]]:
    """The ranges of prompts: the tokens before the first output of a path or, in layout tree, of each root."""
    parents = columns.get("node_parents")
    if parents is None:
        most = len(columns["prompts"]) if "prompts" in columns else length  # the first output may be cut off
        return [(0, min((start for start, _ in spans), default=most))]
    offsets = columns["node_offsets"]
    starts = {int(offset): node for node, offset in enumerate(offsets[:-1]) if parents[node] < 0}
    ends = {int(offsets[node + 1]): node for node in range(len(parents))}
    first = {ends[end]: start for start, end in spans if end in ends}
    return [(offset, first.get(node, int(offsets[node + 1]))) for offset, node in starts.items()]
