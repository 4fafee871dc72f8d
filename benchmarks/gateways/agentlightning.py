"""agent-lightning's server: a proxy that stores each call as an event of a rollout, in memory."""

from __future__ import annotations

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start, answer_of, prompt_and_answer
from benchmarks.scoring import Sample


class AgentLightning(Gateway):
    name = "agentlightning"
    package = "agentlightning"
    licence = "MIT"
    wire = "vLLM /v1/chat/completions, token ids in the answers"
    keeps = "memory"
    health = "/healthz"
    streams = False

    def start(self, place: Place) -> Start:
        command = [str(place.python), "-P", "-m", "agentlightning.server", "host=127.0.0.1", f"port={place.port}"]
        command += ["default_proxy.model_name=bench", f"hydra.run.dir={place.folder}"]
        return Start(command)

    async def prepare(self, http: aiohttp.ClientSession, place: Place) -> None:
        models = [{"model": "bench", "endpoint": f"{place.engine}/v1"}]
        async with http.post(f"{place.url}/api/models", json=models) as response:
            await answer_of(response)

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        rollouts = [{"rollout_id": f"bench-{session}", "input": {}}]
        async with http.post(f"{place.url}/api/rollouts", json=rollouts) as response:
            await answer_of(response)
        path = f"/proxy/rollout/bench-{session}/attempt/0/mode/train/openai/v1/chat/completions"
        return Address(place.url + path)

    async def export(self, http: aiohttp.ClientSession, place: Place, session: int) -> list[Sample]:
        path = f"/api/rollouts/bench-{session}/events"
        query = {"format": "triplet", "event_type": "model_request"}
        async with http.get(place.url + path, params=query) as response:
            if response.status == 404:  # it restarted and the session did not go on
                return []
            events = [event["data"] for event in await answer_of(response)]
        return [prompt_and_answer(session, one["prompt_token_ids"], one["response_token_ids"]) for one in events]
