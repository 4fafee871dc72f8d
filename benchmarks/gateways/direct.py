"""No gateway: the agents ask the engine. Its latencies are those of the load itself."""

from __future__ import annotations

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start


class Direct(Gateway):
    name = "no gateway"
    package = None
    licence = "Apache-2.0"
    wire = "OpenAI /v1/chat/completions"
    keeps = "nothing"
    no_tokens = "it is the engine"

    def start(self, place: Place) -> Start:
        raise NotImplementedError("there is nothing to start")

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        return Address(f"{place.engine}/v1/chat/completions")
