"""A gate and the administration of its engine in one object, for tests that use both."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.engine.admin import EngineAdmin
from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.gate import Gate
from proxy.engine.interface import Engine
from proxy.engine.requests import GenerateRequest
from proxy.settings import Settings
from tokengrove.reasons import FinishReason


class AdminGate(Gate):
    """A gate with its engine as `engine` and the engine's administration as `admin`."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        super().__init__(engine, Settings(**settings))
        self.engine, self.admin = engine, EngineAdmin(engine, self)

    async def read(self, request: GenerateRequest, begun: asyncio.Event | None = None) -> CollectedReply:
        """Sample the whole reply; set `begun` after 20 tokens. Raises AssertionError if a chunk breaks an invariant."""
        reply = CollectedReply()

        def take(chunk: TokenChunk) -> FinishReason | None:
            if begun is not None and len(reply.ids) + len(chunk.ids) >= 20:
                begun.set()
            return reply.add(chunk)

        assert await self.sample(request, take) is reply.finish
        return reply
