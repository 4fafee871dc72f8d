"""The pass-through of the benchmark itself, to which CPU times are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start

_ROOT = Path(__file__).parents[2]


class PassThrough(Gateway):
    name = "pass-through"
    package = None
    licence = "Apache-2.0"
    wire = "OpenAI /v1/chat/completions, bytes"
    keeps = "nothing"
    no_tokens = "it only forwards bytes"

    def start(self, place: Place) -> Start:
        command = [sys.executable, "-m", "benchmarks.passthrough", place.engine, str(place.port)]
        return Start(command, {"PYTHONPATH": str(_ROOT)})

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        return Address(f"{place.url}/v1/chat/completions")
