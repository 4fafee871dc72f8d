"""Sampling with a callback: what an engine offers that has tokens to hand on without waking a task for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Protocol, runtime_checkable

from proxy.engine.chunks import TakeChunk, TokenChunk
from proxy.engine.interface import Engine
from proxy.engine.requests import GenerateRequest
from tokengrove.reasons import FinishReason


@runtime_checkable
class CallbackEngine(Protocol):
    """Additional interface of an engine whose chunks come from a callback of the event loop."""

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample a continuation; return why it ended, or None if the engine gave no reason. Raises as `generate` does.

        `take` is called for each chunk. What it raises is raised here.
        """


Sample = Callable[[GenerateRequest, TakeChunk], Awaitable[FinishReason | None]]
"""`CallbackEngine.sample`."""


def sampler(engine: Engine) -> Sample:
    """How to sample from an engine of either kind with a callback."""
    return engine.sample if isinstance(engine, CallbackEngine) else partial(_read, engine)


async def _read(engine: Engine, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            finish = take(chunk) or chunk.finish
            if finish is not None:
                return finish
    return None


async def generated(sample: Sample, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    """The chunks that `sample` gives to its callback. Closing the generator cancels `sample`."""
    queue: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
    sampling = asyncio.ensure_future(sample(request, queue.put_nowait))
    sampling.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
        sampling.result()
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
