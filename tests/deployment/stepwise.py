"""An engine that gives the next token when the test allows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from tests.support import says, tiny_renderer

TEXT = "12345"
"""A character is a token of the built-in model."""


class Stepwise(ScriptedEngine):
    """Says TEXT. Each token waits for a permit, which a test gives from its own thread."""

    permits = threading.Semaphore(0)

    def __init__(self, settings: Settings) -> None:
        super().__init__(says(TEXT), vocab_size=tiny_renderer().vocab_size)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                await asyncio.to_thread(self.permits.acquire)
                yield chunk
