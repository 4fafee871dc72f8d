"""rllm-model-gateway: forwards chat completions to vLLM, asks for token ids, and stores a trace of each call."""

from __future__ import annotations

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start, answer_of, prompt_and_answer
from benchmarks.scoring import Sample


class Rllm(Gateway):
    name = "rllm"
    package = "rllm-model-gateway"
    licence = "Apache-2.0"
    wire = "vLLM /v1/chat/completions, token ids in the answers"
    keeps = "SQLite file, written after the answer"

    def start(self, place: Place) -> Start:
        command = [str(place.python), "-P", "-m", "rllm_model_gateway", "--host", "127.0.0.1"]
        command += ["--port", str(place.port), "--worker", f"{place.engine}/v1"]
        command += ["--db-path", str(place.folder / "rllm.db")]
        return Start([*command, "--log-level", "warning"])

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        return Address(f"{place.url}/sessions/bench-{session}/v1/chat/completions")

    async def export(self, http: aiohttp.ClientSession, place: Place, session: int) -> list[Sample]:
        async with http.get(f"{place.url}/sessions/bench-{session}/traces") as response:
            traces = await answer_of(response)
        return [prompt_and_answer(session, one["prompt_token_ids"], one["completion_token_ids"]) for one in traces]
