"""Tokengrove: records token ids as a tree, and exports samples that share no trained token."""

from __future__ import annotations

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start, answer_of
from benchmarks.scoring import Sample


class Tokengrove(Gateway):
    name = "tokengrove"
    package = "tokengrove"
    licence = "Apache-2.0"
    wire = "SGLang /generate, token ids"
    keeps = "SQLite file, committed before the answer ends"

    def start(self, place: Place) -> Start:
        database = f"sqlite:///{place.folder / 'tokengrove.db'}"
        command = [str(place.python), "-m", "tokengrove", "serve", "--host", "127.0.0.1", "--port", str(place.port)]
        command += ["--engine", place.engine, "--model", str(place.model), "--database-url", database]
        return Start([*command, "--log-level", "warning"])

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        return Address(f"{place.url}/bench-{session}/v1/chat/completions")

    async def export(self, http: aiohttp.ClientSession, place: Place, session: int) -> list[Sample]:
        body = {"session_id": f"bench-{session}", "layout": "concat"}
        async with http.post(f"{place.url}/trajectories/export", json=body) as response:
            answer = await answer_of(response)
        return [Sample(session, sample["input_ids"], sample["loss_mask"]) for sample in answer["samples"]]
