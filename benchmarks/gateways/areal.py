"""AReaL's data proxy: renders prompts, samples from SGLang with token ids, and keeps each call in memory.

It runs with the defaults of its command: `--chat-template-type hf` renders the whole conversation in each turn. It asks
the engine for whole answers, also if the agent streams. An export is the trajectory that a reward has ended; its
tensors are fetched one by one.
"""

from __future__ import annotations

import base64
from array import array
from collections import defaultdict
from typing import Any

import aiohttp

from benchmarks.client import Address
from benchmarks.gateways.base import Gateway, Place, Start, answer_of
from benchmarks.scoring import Sample

_ADMIN = {"authorization": "Bearer areal-admin-key"}
_COLUMNS = ("input_ids", "loss_mask", "attention_mask")


class Areal(Gateway):
    name = "areal"
    package = "areal"
    licence = "Apache-2.0"
    wire = "SGLang /generate, token ids"
    keeps = "memory"
    streams = False

    def __init__(self) -> None:
        self._opened: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def start(self, place: Place) -> Start:
        command = [str(place.python), "-P", "-m", "areal.experimental.inference_service.data_proxy"]
        command += ["--host", "127.0.0.1", "--port", str(place.port), "--backend-addr", place.engine]
        return Start([*command, "--tokenizer-path", str(place.model)], {"HF_HUB_OFFLINE": "1"})

    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        task = f"bench-{session}"
        async with http.post(f"{place.url}/rl/start_session", json={"task_id": task}, headers=_ADMIN) as response:
            begun = (await answer_of(response))["sessions"][0]
        self._opened[task].append((begun["session_id"], begun["session_api_key"]))
        return Address(f"{place.url}/chat/completions", {"authorization": f"Bearer {begun['session_api_key']}"})

    async def export(self, http: aiohttp.ClientSession, place: Place, session: int) -> list[Sample]:
        found = []
        for name, key in self._opened.pop(f"bench-{session}", []):
            headers = {"authorization": f"Bearer {key}"}
            async with http.post(f"{place.url}/rl/set_reward", json={"reward": 1.0}, headers=headers) as response:
                if response.status == 401:  # it restarted, and knows no session of before
                    continue
                ended = await answer_of(response)
            body = {"session_ids": [name], "trajectory_id": ended["trajectory_id"], "remove_session": True}
            async with http.post(f"{place.url}/export_trajectories", json=body, headers=_ADMIN) as response:
                trajectory = (await answer_of(response))["traj"]
            columns = [await _rows(http, place, trajectory[name]) for name in _COLUMNS]
            for ids, mask, attention in zip(*columns, strict=True):
                length = sum(attention)
                found.append(Sample(session, ids[:length], mask[:length]))
        return found


async def _rows(http: aiohttp.ClientSession, place: Place, handle: Any) -> list[list[int]]:
    """Return the rows of a tensor whose handle an export has."""
    shard = handle["data"]["shard"]
    shard_id = (shard.get("data") or shard)["shard_id"]
    async with http.get(f"{place.url}/data/{shard_id}") as response:
        tensor = await answer_of(response)
    rows, columns = tensor["shape"]
    code = {"torch.int64": "q", "torch.int32": "i", "torch.bool": "B"}[tensor["dtype"]]
    values = array(code, base64.b64decode(tensor["data"])).tolist()
    return [values[row * columns : (row + 1) * columns] for row in range(rows)]
