"""SGLang servers in process, which die, are cut off and lie, and what stands for the connections to them.

The logprob of a token tells which server sampled it with which weights, whatever the answer says of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any
from unittest import mock

import orjson

from proxy.engine.interface import MEMORY_TAGS, PauseMode
from proxy.engine.servers import kinds, sglang_server
from proxy.engine.servers.connection import Keys, server_url
from proxy.types import ids_of
from tests.engines.scripts import following
from tests.torture.runs import World
from tokengrove.errors import EngineLost, EngineUnavailable, InvalidRequest

_TICK_S = 0.02
_ABSENT = ("/workers", "/list_workers")
"""Paths that a server does not have, or that its engine can do without."""

_LOAD_S, _START_S = 1.0, 2.0
_TORN = 63
_SERVERS, _PARTS_OF_ONE = 64, 8.0


def sampled_by(logprob: float) -> tuple[int, int]:
    """The number of the server that sampled a token, and the version of its weights."""
    return divmod(int(-logprob * _PARTS_OF_ONE) - 1, _SERVERS)


def adapter_number(path: str) -> int:
    """The number of an adapter by its folder; its tokens depend on it."""
    return int(path.rpartition("/")[2])


class Server:
    """A server and its weights. `lie`: the version that its answers name; "" if they name none, None if the true one.

    `had`: the versions of all weights that it ever had. `wrong`: what it was asked that would have crashed it.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.url = world, number, f"http://s{number}:1"
        self.up = self.reachable = True
        self.lives = self.aborts = 0
        self.lie: str | None = None
        self.lied = False
        self.spans = world.random.random() < 0.5
        self.had, self.wrong = {0}, list[str]()
        self._begin()

    @property
    def answers(self) -> bool:
        return self.up and self.reachable

    @property
    def whole(self) -> bool:
        """Whether all of its memory is there."""
        return not self.released

    @property
    def torn(self) -> bool:
        """Whether it has parts of two versions."""
        return self.weights == _TORN

    def die(self) -> None:
        """Lose everything that it has."""
        self.up, self.lives = False, self.lives + 1

    def rise(self) -> None:
        """Start with the first weights, unless it has started already."""
        if not self.up:
            self.up = True
            self._begin()

    def deceive(self, lie: str | None) -> None:
        """Name this version in answers from now on."""
        self.lie, self.lied = lie, self.lied or lie is not None

    def _begin(self) -> None:
        self.name, self.weights = "default", 0
        self.mode: PauseMode | None = None
        self.released, self.parts, self.running = set[str](), list[int](), dict[str, tuple[Connection, int]]()
        self.target = 0
        self.adapters: dict[str, str] = {}

    def check(self, life: int, *, ran: bool = True) -> None:
        """Raise EngineLost unless it has lived on since it was in this life."""
        if not self.answers or life != self.lives:
            raise EngineLost(f"{self.url} does not answer", ran=ran)

    async def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """Answer a call, unless it or its answer is lost on the way."""
        await self.world.some_time(0.05)
        life = self.lives
        self.check(life, ran=False)
        if path.startswith(("/update_weights", "/end_")):
            await asyncio.sleep(self.world.random.uniform(0.0, _LOAD_S))
            if life != self.lives:
                raise EngineLost(f"{self.url} has died")
        answer = self._do(path, body)
        await self.world.some_time(0.05)
        self.check(life)
        return answer

    def _do(self, path: str, body: Mapping[str, Any]) -> Any:
        match path:
            case "/model_info":
                return {"weight_version": self.name}
            case "/server_info":
                return {"enable_memory_saver": True, "incremental_streaming_output": False, "enable_lora": True}
            case "/v1/models":
                return {"data": [{"id": name} for name in ("m", *self.adapters)]}
            case "/load_lora_adapter":
                if body["lora_name"] in self.adapters:
                    raise InvalidRequest(f"Failed to load {body['lora_name']} because it is already loaded")
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    raise InvalidRequest(f"LoRA with name {body['lora_name']} does not exist")
            case "/ready":
                if self.mode is not None:
                    raise EngineLost("it answers 503")
            case "/pause_generation":
                self.mode = PauseMode(body["mode"])
                self.aborts += self.mode is PauseMode.ABORT
            case "/continue_generation":
                self.mode = None
            case "/update_weights_from_disk":
                self._has(int(body["weight_version"]), body["weight_version"])
            case "/begin_weight_update":
                self.parts.clear()
            case "/update_weights_from_distributed":
                self._take_part(body)
            case "/end_weight_update":
                self.name = body.get("weight_version", self.name)
            case "/release_memory_occupation":
                self._release(set(body["tags"] or MEMORY_TAGS))
            case "/resume_memory_occupation":
                self._take_back(set(body["tags"] or MEMORY_TAGS))
        return {"success": True}

    def _has(self, weights: int, name: str) -> None:
        self.weights, self.name = weights, name
        self.parts.clear()
        if weights != _TORN:
            self.had.add(weights)

    def _take_part(self, body: Mapping[str, Any]) -> None:
        """Take one of the parts of new weights. Only who has all of them has these weights."""
        if body["target"] != self.target:
            self.parts.clear()
        self.target = body["target"]
        self.parts.append(body["part"])
        if len(set(self.parts)) == body["of"]:
            self._has(self.target, self.name)
        else:
            self.weights = _TORN
        self.name = body.get("weight_version", self.name)

    def _release(self, tags: set[str]) -> None:
        read = [rid for rid, (connection, cuts) in self.running.items() if connection.cuts == cuts]
        if read or self.mode is None:
            self.wrong.append(f"{self.url} released memory with {read}, mode {self.mode}")
        self.released |= tags

    def _take_back(self, tags: set[str]) -> None:
        if not tags <= self.released:  # its scheduler dies of that
            self.die()
            self.world.loop.call_later(_START_S, self.rise)
        self.released -= tags

    async def sample(self, body: Mapping[str, Any], connection: Connection) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of an answer, each with all tokens so far."""
        await self.world.some_time(0.05)
        life, cuts, aborts = self.lives, connection.cuts, self.aborts
        self.check(life)
        params, taste = body["sampling_params"], 0
        if (name := body.get("lora_path")) is not None:
            if name not in self.adapters:
                raise InvalidRequest(f"Got LoRA adapter that has never been loaded: {name}")
            taste = adapter_number(self.adapters[name])
        ids = following(ids_of(body["input_ids"]), params["max_new_tokens"], taste)
        every = params.get("stream_interval", 1) if body["stream"] else len(ids)
        taken: list[list[Any]] = []
        had: list[int] = []
        self.running[body["rid"]] = connection, cuts
        try:
            while len(taken) < len(ids):
                await asyncio.sleep(_TICK_S)
                self.check(life)
                if connection.cuts != cuts:
                    raise EngineLost("the reply was abandoned")
                if self.aborts != aborts or body["rid"] not in self.running:
                    yield self._part(body, ids, taken, had, "abort")
                    return
                if self.mode is not None:
                    continue
                if self.released:
                    self.wrong.append(f"{self.url} sampled without its memory")
                had.append(self.weights)
                lp = -(1 + self.weights + _SERVERS * self.number) / _PARTS_OF_ONE
                taken.append([lp, ids[len(taken)], None])
                if len(taken) == len(ids):
                    yield self._part(body, ids, taken, had, "length")
                elif len(taken) == 1 or len(taken) % every == 0:
                    yield self._part(body, ids, taken, had, None)
        finally:
            self.running.pop(body["rid"], None)

    def _part(
        self, body: Mapping[str, Any], ids: Sequence[int], taken: list[Any], had: list[int], finish: str | None
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish and {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(taken),
            "output_token_logprobs": list(taken),
        }
        name = self.name if self.lie is None else self.lie
        if name:
            meta["weight_version"] = name
            if finish and self.spans and had:
                meta["weight_versions"] = [
                    {"version": str(version) if self.lie is None else name, "start": at, "end": at + 1}
                    for at, version in enumerate(had)
                ]
        return {"output_ids": list(ids[: len(taken)]), "meta_info": meta}


class Connection:
    """Stands for `ServerConnection`. `cuts`: how often all replies were abandoned."""

    servers: Mapping[str, Server] = {}

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = server_url(url)
        self._server = self.servers[self.url]
        self.cuts = 0
        self._closed = False

    async def probe(self, path: str) -> Any:
        return None if path in _ABSENT else await self.call(path)

    async def call(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = 600.0) -> Any:
        if self._closed:
            raise EngineLost("the connection is closed")
        if path == "/abort_request":
            self._server.running.pop((body or {})["rid"], None)
            return {}
        return await self._server.call(path, body or {})

    async def generate(self, path: str, body: Sequence[bytes], headers: Mapping[str, str]) -> Any:
        last: Any = None
        async with aclosing(self._server.sample(orjson.loads(b"".join(body)), self)) as parts:
            async for part in parts:
                last = part
        return last

    async def stream(self, path: str, body: Sequence[bytes], headers: Mapping[str, str], reply: Any) -> None:
        async with aclosing(self._server.sample(orjson.loads(b"".join(body)), self)) as parts:
            async for part in parts:
                if reply.feed(b"data: " + orjson.dumps(part) + b"\n\n"):
                    return
        raise EngineUnavailable("the stream has no end")

    def cut(self) -> None:
        self.cuts += 1

    async def close(self) -> None:
        self.cuts += 1
        self._closed = True


@contextmanager
def connected(servers: Mapping[str, Server]) -> Iterator[None]:
    """Let SGLang's engine find these servers."""
    with (
        mock.patch.object(Connection, "servers", servers),
        mock.patch.object(sglang_server, "ServerConnection", Connection),
        mock.patch.object(kinds, "ServerConnection", Connection),
    ):
        yield
