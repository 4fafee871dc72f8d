"""A scripted engine that also reports kept sets and routed experts, which depend on the tokens and positions alone."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import EngineInfo
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Script
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS
from proxy.side_columns.kept_sets import kept_rows
from proxy.side_columns.rows import SideColumn, SideRows
from tokengrove.options.start import Replay

LAYERS, CHOSEN = 3, 2


def experts_of(tokens: Sequence[int], start: int) -> NDArray[np.uint8]:
    """The experts of tokens from position `start` on, uint8 [tokens, LAYERS, CHOSEN]."""
    at = np.arange(start, start + len(tokens))[:, None, None] + np.asarray(tokens)[:, None, None]
    layer, slot = np.arange(LAYERS)[None, :, None], np.arange(CHOSEN)[None, None, :]
    return ((at + 5 * layer + 7 * slot) % 97).astype(np.uint8)


def kept_of(token: int) -> list[int]:
    """The ids that are kept beside a token, itself included."""
    return sorted({token, *range(token % 5)})


class RecordingEngine(ScriptedEngine):
    """Reports N-1 rows of experts, with the last chunk. `made`: weak references to the rows so far."""

    def __init__(self, script: Script, **given: Any) -> None:
        super().__init__(script, **given)
        self.made: list[ref[NDArray[Any]]] = []

    @property
    def rows_in_memory(self) -> int:
        """How many of the arrays of rows that were reported are still in memory."""
        gc.collect()
        return sum(each() is not None for each in self.made)

    def info(self) -> EngineInfo:
        """As the scripted engine, with all columns."""
        return replace(super().info(), records=frozenset(Replay))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Play the reply of the script, with the columns that the request asks for."""
        output: list[int] = []
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                at = len(request.prompt) + len(output)
                output += chunk.ids
                columns = {**self._kept(chunk, request, at), **self._experts(chunk, request, output)}
                self.made += [ref(each.rows.values) for each in columns.values()]
                told = replace(chunk, columns=columns or None)
                del columns, chunk
                yield told
                del told

    def _kept(self, chunk: TokenChunk, request: GenerateRequest, at: int) -> dict[str, SideColumn]:
        if request.columns is None or Replay.KEPT not in request.columns.replay:
            return {}
        sets = kept_rows(map(kept_of, chunk.ids), self.info().vocab_size, request.columns.max_kept)
        logprobs = SideRows(np.full(len(chunk.ids), -0.25, np.float32))
        return {KEPT: SideColumn(at, sets), KEPT_LOGPROBS: SideColumn(at, logprobs)}

    def _experts(self, chunk: TokenChunk, request: GenerateRequest, output: list[int]) -> dict[str, SideColumn]:
        if request.columns is None or Replay.EXPERTS not in request.columns.replay or chunk.finish is None:
            return {}
        start = request.columns.start
        taken_in = [*request.input_ids, *output][start:-1]
        return {EXPERTS: SideColumn(start, SideRows(experts_of(taken_in, start)))}
