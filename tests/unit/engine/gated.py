"""Engines for tests of the gate: scripted ones that die, that refuse, that hold memory, and that keep watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from proxy.engine.chunks import TokenChunk
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import Capability, EngineInfo, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.errors import EngineLost, EngineUnavailable, InvalidRequest
from proxy.types import SamplingParams, ids_of
from tests.engines.gates import AdminGate
from tests.engines.scripts import VOCABULARY, following, model_like

GRAMMAR = Grammar(((GrammarPart(text="yes"),),))
TICK_S = 0.001


class WatchfulEngine(ScriptedEngine):
    """Plays what a model would say, and notes whoever is let in while it is paused.

    `deaths`: after how many tokens of a submission the server behind it dies, one entry a submission.
    """

    def __init__(self, tick_s: float = TICK_S, deaths: Sequence[int] = ()) -> None:
        super().__init__(model_like(tick_s), vocab_size=VOCABULARY)
        self.trespassers: list[str] = []
        self.deaths = list(deaths)

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self.paused:
            self.trespassers.append(request.request_id)
        left = self.deaths.pop(0) if self.deaths else -1
        given = 0
        if left == 0:
            raise EngineLost("the server is gone")
        async with aclosing(cast("AsyncGenerator[TokenChunk, None]", super().generate(request))) as chunks:
            async for chunk in chunks:
                given += len(chunk.ids)
                if given == len(chunk.ids):
                    chunk = replace(chunk, cached_tokens=len(request.input_ids))
                if given == left:
                    yield replace(chunk, finish=None)  # the word that it was the last one is lost with the server
                    raise EngineLost("the server is gone")
                yield chunk

    async def update_weights(self, path: str, version: int | None = None) -> int:
        await asyncio.sleep(TICK_S)  # loading takes a while, in which others come to run
        return await super().update_weights(path, version)


class RefusingEngine(WatchfulEngine):
    """Its pause stops it, and then fails; its updates fail."""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        raise EngineUnavailable("this engine cannot pause")


class StubbornEngine(WatchfulEngine):
    """It takes no weights."""

    async def update_weights(self, path: str, version: int | None = None) -> int:
        raise InvalidRequest(f"{path} holds no weights", param="path")


class HoldingEngine(WatchfulEngine):
    """It gives memory back, by the rules of SGLang: nothing may run, and no tag is released or resumed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"weights", "kv_cache", "cuda_graph"}
        self.broken = False

    def info(self) -> EngineInfo:
        return replace(super().info(), capabilities=frozenset(Capability))

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
    """A request of `count` tokens, which no end token ends."""
    prompt = ids_of(range(start, start + 8))
    grammar = GRAMMAR if constrained else None
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=count, ignore_eos=True), grammar=grammar)


def uninterrupted(request: GenerateRequest) -> list[int]:
    """What the model says when nothing happens to it."""
    return following(request.input_ids, request.sampling.max_tokens or 0)
