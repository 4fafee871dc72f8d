"""Scripted engines for tests of the gate: they die, refuse, hold memory, and record requests during a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import PauseMode
from proxy.engine.requests import Failure, GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tests.engines.gates import AdminGate
from tests.engines.scripts import VOCABULARY, following, model_like
from tokengrove.errors import EngineLost, EngineUnavailable, InvalidRequest

GRAMMAR = Grammar(((GrammarPart(text="yes"),),))
TICK_S = 0.001


class WatchfulEngine(ScriptedEngine):
    """Plays `model_like`; records requests that arrive during a pause in `trespassers`.

    `deaths`: one entry per submission, the number of tokens after which its server dies.
    """

    def __init__(self, tick_s: float = TICK_S, deaths: Sequence[int] = ()) -> None:
        super().__init__(model_like(tick_s), vocab_size=VOCABULARY)
        self.trespassers: list[str] = []
        self.deaths = list(deaths)

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.paused:
            self.trespassers.append(request.request_id)
        left = self.deaths.pop(0) if self.deaths else -1
        given = 0
        if left == 0:
            raise EngineLost("the server is gone")
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                given += len(chunk.ids)
                if given == len(chunk.ids):
                    chunk = replace(chunk, cached_tokens=len(request.input_ids))
                if given == left:
                    yield replace(chunk, finish=None)  # the finish reason is lost with the server
                    raise EngineLost("the server is gone")
                yield chunk

    async def update_weights(self, path: str, version: int | None = None) -> int:
        await asyncio.sleep(TICK_S)  # loading takes time, in which other tasks run
        return await super().update_weights(path, version)


class RefusingEngine(WatchfulEngine):
    """Its `pause` stops sampling, then raises an error."""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        raise EngineUnavailable("this engine cannot pause")


class StubbornEngine(WatchfulEngine):
    """Its `update_weights` raises an error."""

    async def update_weights(self, path: str, version: int | None = None) -> int:
        raise InvalidRequest(f"{path} holds no weights", param="path")


class PooledEngine(WatchfulEngine):
    """Loses its only server by `fall`, with the requests that it runs, and gets it back by `rise`."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        super().__init__(tick_s)
        self._rises, self._falls = asyncio.Event(), 0
        self._rises.set()

    @property
    def alive(self) -> bool:
        return self._rises.is_set()

    def check_alive(self) -> None:
        assert self.alive

    async def until_alive(self) -> None:
        await self._rises.wait()

    def note_resubmission(self, failure: Failure) -> None:
        pass

    def has_other(self, failures: Sequence[Failure]) -> bool:
        return False

    def fall(self) -> None:
        self._rises.clear()
        self._falls += 1

    def rise(self) -> None:
        self._rises.set()

    async def show(self) -> list[dict[str, Any]]:
        return []

    async def add(self, url: str) -> None:
        pass

    async def remove(self, url: str) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if not self.alive:
            self.trespassers.append(request.request_id)
        falls = self._falls
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                if self._falls > falls:
                    raise EngineLost("the server is gone")
                yield chunk


class HoldingEngine(WatchfulEngine):
    """Releases memory by SGLang's rules: no request runs, and no tag is released or resumed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"weights", "kv_cache", "cuda_graph"}
        self.broken = False

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        kinds = set(tags or ("weights", "kv_cache", "cuda_graph"))
        if self.broken:
            raise EngineUnavailable("memory cannot be released just now")
        assert not self.running, "a scheduler that runs something dies of this"
        assert kinds <= self.held, f"{kinds - self.held} is released already"
        self.held -= kinds

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        kinds = set(tags or ("weights", "kv_cache", "cuda_graph"))
        assert not kinds & self.held, f"{kinds & self.held} is there already"
        self.held |= kinds


def gate_of(engine: ScriptedEngine, **settings: Any) -> AdminGate:
    return AdminGate(engine, **settings)


def asking(name: str, count: int, *, start: int = 40, constrained: bool = False) -> GenerateRequest:
    """A request of exactly `count` tokens: end tokens are ignored."""
    prompt = ids_of(range(start, start + 8))
    grammar = GRAMMAR if constrained else None
    return GenerateRequest(name, PromptIds(prompt), SamplingParams(max_tokens=count, ignore_eos=True), grammar=grammar)


def uninterrupted(request: GenerateRequest) -> list[int]:
    """The output of `request` without pauses and lost servers."""
    return following(request.input_ids, request.sampling.max_tokens or 0)
