"""`--engine tests.e2e.modelled:ModelEngine`: each token follows from those before it, so tests can check every id."""

from __future__ import annotations

import asyncio

from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from tests.engines.scripts import VOCABULARY, model_like
from tokengrove.errors import InvalidRequest

TOKEN_S = 0.002


class ModelEngine(ScriptedEngine):
    """Refuses weights with "broken" in their path, and takes a while to load any others."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(model_like(TOKEN_S), vocab_size=VOCABULARY)
        self.keep_requests = False

    async def update_weights(self, path: str, version: int | None = None) -> int:
        await asyncio.sleep(TOKEN_S * 5)
        if "broken" in path:
            raise InvalidRequest(f"{path} holds no weights", param="path")
        return await super().update_weights(path, version)
