"""LiteLLM's proxy: forwards chat completions. It records no token ids."""

from __future__ import annotations

import json

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start


class Litellm(Gateway):
    name = "litellm"
    package = "litellm"
    licence = "MIT"
    wire = "OpenAI /v1/chat/completions"
    keeps = "nothing (its spend log needs PostgreSQL, and has texts)"
    no_tokens = "its proxy records texts and counts, no token ids"
    health = "/health/liveliness"

    def start(self, place: Place) -> Start:
        config = place.folder / "litellm.json"
        params = {"model": "openai/bench", "api_base": f"{place.engine}/v1", "api_key": "none"}
        config.write_text(json.dumps({"model_list": [{"model_name": "bench", "litellm_params": params}]}))
        command = [str(place.python), "-P", "-m", "litellm.proxy.proxy_cli", "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(place.port), "--num_workers", "1"]
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # as the others: open on loopback
        }
        return Start(command, environment)

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        return Address(f"{place.url}/v1/chat/completions")
