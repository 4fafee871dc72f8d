"""The experts of every token in the KV cache, kept on the host by the slot of its keys and values.

Keys and values of a prefix may be reused by later requests, which then take no pass of their own over these tokens: its
rows are read from here. A slot whose pass is not known has no row. Only models with experts have this memory: slots x
layers x k bytes at most (twice that for more than 255 experts), of which the system provides what has been written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.engine.transformers.batching import ContinuousBatch, StepEntry
from proxy.engine.transformers.experts import ExpertHooks
from proxy.side_columns.rows import SideColumn, SideRows, spread
from tokengrove.rows_beside import missing_value


class ExpertRows:
    """The rows by slot of one batch. Methods are called on the batching thread, `forget` while it is parked."""

    def __init__(self, hooks: ExpertHooks, batch: ContinuousBatch) -> None:
        self._hooks = hooks
        self._batch = batch
        self._rows: NDArray[Any] | None = None
        self._known = np.zeros(0, bool)

    def take(self, entries: Sequence[StepEntry]) -> NDArray[Any] | None:
        """Keep the rows of the step that has just run; return them in the order of its tokens, None if unknown."""
        found = self._hooks.take(sum(entry.processed for entry in entries))
        slots = [self._batch.slots(entry.serial, entry.first, entry.processed) for entry in entries]
        if not any(each is None for each in slots):
            self._keep(np.concatenate([each for each in slots if each is not None]), found)
        return found

    def cached(self, serial: str, start: int, end: int) -> SideRows | None:
        """The rows of the positions [start, end) of a request in the current step, missing where they are unknown.

        None if no row was ever kept.
        """
        slots = self._batch.slots(serial, start, end - start)
        if slots is None or self._rows is None:
            return None
        rows = self._rows[slots]
        rows[~self._known[slots]] = missing_value(rows.dtype)
        return SideRows(rows)

    def forget(self) -> None:
        """Drop all rows, since the cache is emptied."""
        self._known[:] = False

    def _keep(self, slots: NDArray[np.int64], rows: NDArray[Any] | None) -> None:
        if rows is not None:
            if self._rows is None:
                self._rows = np.empty((self._batch.slot_count, *rows.shape[1:]), rows.dtype)
                self._known = np.zeros(self._batch.slot_count, bool)
            self._rows[slots] = rows
        if self._rows is not None:
            self._known[slots] = rows is not None


@dataclass(slots=True)
class PendingExperts:
    """The rows of one request that wait for its next token.

    `sent`: the position after the last row that was sent. `reached`: the position after the last that has been
    processed, or was sent.
    """

    sent: int
    reached: int = field(init=False)
    _parts: list[SideColumn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = self.sent

    def add(self, kept: ExpertRows, entry: StepEntry, rows: NDArray[Any] | None) -> None:
        """Add the rows of a step, [processed, layers, k], and before them those of a cached prefix.

        `rows` None: they are not known.
        """
        if self.reached < entry.first:
            cached = kept.cached(entry.serial, self.reached, entry.first)
            self._parts += [] if cached is None else [SideColumn(self.reached, cached)]
            self.reached = entry.first
        end = entry.first + entry.processed
        if self.reached < end:
            if rows is not None:
                self._parts.append(SideColumn(self.reached, SideRows(rows[self.reached - entry.first :].copy())))
            self.reached = end

    def start_again(self) -> None:
        """Drop the rows that were not sent: the request is processed again, perhaps with other weights."""
        self.reached = self.sent
        self._parts.clear()

    def take(self) -> SideColumn | None:
        """The rows that were not sent, which then count as sent; None if none is known."""
        start, parts = self.sent, self._parts
        self.sent, self._parts = self.reached, []
        return SideColumn(start, spread(parts, start, self.reached)) if parts else None
