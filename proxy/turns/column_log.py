"""The side columns of a turn while it runs: rows arrive with chunks, in any order, and are cut like its tokens.

The first row that arrives for a token counts: a request that is resubmitted may report earlier rows again, of another
forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from proxy.engine.chunks import TokenChunk
from proxy.side_columns.columns import DECLARED, TOP_IDS, TOP_LOGPROBS, ColumnRequest, Columns
from proxy.side_columns.rows import SideColumn, SideRows, merged, spread
from tokengrove.options.start import Replay

_MERGED_PARTS = 64
"""Parts are joined when there are this many: the objects around a row of one token take more memory than the row."""


class ColumnLog:
    """`alternatives`: how many alternatives of each sampled token are recorded."""

    def __init__(self, wanted: ColumnRequest, alternatives: int) -> None:
        self._names = [name for name, column in DECLARED.items() if column.of in wanted.replay]
        self._alternatives = alternatives if Replay.TOP_LOGPROBS in wanted.replay else 0
        self._parts: dict[str, list[SideColumn]] = defaultdict(list)

    def add(self, chunk: TokenChunk, at: int) -> None:
        """Add the rows of a chunk, whose first token has position `at`."""
        for name, column in (chunk.columns or {}).items():
            if name in self._names and len(column.rows):
                self._append(name, column)
        if self._alternatives and chunk.top_logprobs and chunk.sampled:
            for name, rows in _alternatives(chunk.top_logprobs, self._alternatives).items():
                self._append(name, SideColumn(at, rows))

    def _append(self, name: str, column: SideColumn) -> None:
        parts = self._parts[name]
        parts.append(column)
        if len(parts) % _MERGED_PARTS == 0:
            self._parts[name] = merged(parts)

    def taken(self, prefix_tokens: int, prompt_tokens: int, output_tokens: int) -> tuple[Columns, Mapping[str, int]]:
        """The columns of a turn with these numbers of tokens, and the number of missing rows of each column.

        `prefix_tokens`: of the prompt, those of its parent. A column without any row is left out, and all its rows are
        missing.
        """
        found: dict[str, SideColumn] = {}
        missing: dict[str, int] = {}
        for name in self._names:
            start, end = DECLARED[name].span(prefix_tokens, prompt_tokens, output_tokens)
            missing[name] = end - start
            if self._parts[name]:
                rows = spread(merged(self._parts[name]), start, end)
                found[name] = SideColumn(start, rows)
                missing[name] = int(rows.missing.sum())
        return found, missing


def _alternatives(top: tuple[tuple[tuple[int, float], ...], ...], most: int) -> Mapping[str, SideRows]:
    """The rows of alternatives, likeliest first. A token with fewer has missing entries at the end."""
    ids = np.full((len(top), most), np.iinfo(np.uint32).max, np.uint32)
    logprobs = np.full((len(top), most), np.nan, np.float32)
    for row, pairs in enumerate(top):
        kept = pairs[:most]
        ids[row, : len(kept)] = [token for token, _ in kept]
        logprobs[row, : len(kept)] = [logprob for _, logprob in kept]
    return {TOP_IDS: SideRows(ids), TOP_LOGPROBS: SideRows(logprobs)}
