"""A scripted engine that reports side columns, each row computed from its position, and a server with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from proxy.app import build_app
from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import EngineInfo
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS
from proxy.side_columns.kept_sets import kept_rows
from proxy.side_columns.rows import SideColumn, SideRows
from tests.support import JSON, Server, default_url, says, tiny_renderer
from tokengrove.options.start import Replay

LAYERS, CHOSEN, EXPERT_COUNT = 3, 2, 16
ALL = tuple(map(str, Replay))


def experts_at(position: int) -> list[list[int]]:
    """The experts of the token at a position, [layers][k]."""
    return [[(3 * position + 5 * layer + 7 * at) % EXPERT_COUNT for at in range(CHOSEN)] for layer in range(LAYERS)]


def kept_at(position: int, token: int, vocab_size: int) -> list[int] | None:
    """The ids that were kept where a token was sampled: a few, all but a few, or an unknown set."""
    if position % 11 == 0:
        return None
    if position % 7 == 0:
        return [each for each in range(vocab_size) if each == token or each % 200]
    return [(token + step) % vocab_size for step in range(1 + position % 5)]


def gap_at(position: int) -> float:
    """The kept logprob of a token minus its logprob."""
    return 0.1 * (position % 3)


class RecordingEngine(ScriptedEngine):
    """Records everything. `lost`: tells positions of which it reports no experts."""

    lost: Callable[[int], bool] = staticmethod(lambda position: False)

    def info(self) -> EngineInfo:
        return replace(super().info(), records=frozenset(Replay))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        at, taken = len(request.prompt), request.columns.start if request.columns else 0
        async with contextlib.aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                end = at + len(chunk.ids)
                if request.columns is not None and len(chunk.ids):
                    chunk = replace(chunk, columns=self._columns(chunk, at, taken))
                    taken = end - 1
                at = end
                yield chunk

    def _columns(self, chunk: TokenChunk, at: int, taken: int) -> Mapping[str, SideColumn]:
        size, ids = self.info().vocab_size, list(enumerate(chunk.ids, at))
        sets = [kept_at(position, token, size) for position, token in ids]
        beyond = [logprob + gap_at(at + place) for place, logprob in enumerate(chunk.logprobs)]
        blank = [[255] * CHOSEN] * LAYERS
        took = [blank if self.lost(position) else experts_at(position) for position in range(taken, at + len(ids) - 1)]
        experts = np.array(took, np.uint8).reshape(len(took), LAYERS, CHOSEN)
        return {
            KEPT: SideColumn(at, kept_rows(sets, size, 512)),
            KEPT_LOGPROBS: SideColumn(at, SideRows(np.array(beyond, np.float32))),
            EXPERTS: SideColumn(taken, SideRows(experts)),
        }


@contextlib.asynccontextmanager
async def recording(folder: Path, *replies: str, replay: Sequence[str] = ALL, **settings: Any) -> AsyncIterator[Server]:
    """Run an app on this engine, which says `replies`; its sessions record `replay`."""
    configured = Settings(database_url=default_url(folder), migrate=True, replay=tuple(replay), **settings)
    renderer = tiny_renderer(configured.thinking_retention)
    engine = RecordingEngine(says(*replies), vocab_size=renderer.vocab_size)
    app = build_app(configured, engine=engine, renderer=renderer)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, engine)
