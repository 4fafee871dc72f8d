"""Side columns made by hand: every row names its turn and its token, so that a row at another token is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, TOP_IDS, TOP_LOGPROBS, Columns, SideShape
from proxy.side_columns.rows import SideColumn, SideRows, joined
from proxy.types import Interaction

LAYERS, K = 2, 3
SHAPES = (
    SideShape(KEPT, np.dtype(np.uint16)),
    SideShape(KEPT_LOGPROBS, np.dtype(np.float32)),
    SideShape(EXPERTS, np.dtype(np.uint8), (LAYERS, K)),
    SideShape(TOP_IDS, np.dtype(np.uint32), (2,)),
    SideShape(TOP_LOGPROBS, np.dtype(np.float32), (2,)),
)


def experts(number: int, position: int) -> list[list[int]]:
    """The row of turn `number` for the token at `position`."""
    return [[number, position, layer] for layer in range(LAYERS)]


def kept(number: int, index: int) -> tuple[int, list[int]]:
    """Count and ids of the set of output token `index`: sets, complements and the set of all ids."""
    ids = [number, 100 + index, 300][: (number + index) % 4]
    return (-len(ids) - 1 if (number + index) % 2 or not ids else len(ids)), ids


def column_of(number: int, node: Interaction, lacks: Sequence[int] = ()) -> Columns:
    """All columns of a turn; `lacks`: positions whose row is missing."""
    start, end = max(node.prefix_length - 1, 0), node.prompt_tokens + len(node.output_ids)
    passes = [experts(number, at) if at not in lacks else [[255] * K] * LAYERS for at in range(start, end - 1)]
    rows = np.array(passes, np.uint8).reshape(-1, LAYERS, K)
    first, outputs = node.prompt_tokens, range(len(node.output_ids))
    sets = [SideRows(np.zeros(0, np.uint16), np.zeros(0, np.int32))]
    for index in outputs:
        count, ids = (0, []) if first + index in lacks else kept(number, index)
        sets.append(SideRows(np.array(ids, np.uint16), np.array([count], np.int32)))
    floats = [np.nan if first + index in lacks else -(number + 1) / (index + 2) for index in outputs]
    values = np.array(floats, np.float32)
    top = np.stack([np.full(len(values), 7 * number), np.arange(len(values))], axis=1).astype(np.uint32)
    top[np.isnan(values)] = np.iinfo(np.uint32).max
    return {
        EXPERTS: SideColumn(start, SideRows(rows)),
        KEPT: SideColumn(first, joined(sets)),
        KEPT_LOGPROBS: SideColumn(first, SideRows(values)),
        TOP_IDS: SideColumn(first, SideRows(top)),
        TOP_LOGPROBS: SideColumn(first, SideRows(np.stack([values, values * 2], axis=1))),
    }


def columns_of_all(
    nodes: Sequence[Interaction], lacks: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Columns]:
    """The columns of all turns, by interaction id. `lacks`: positions whose rows are missing, by id."""
    return {node.id: column_of(number, node, (lacks or {}).get(node.id, ())) for number, node in enumerate(nodes)}
