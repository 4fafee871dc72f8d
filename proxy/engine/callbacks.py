"""Sampling with a callback, for engines that pass tokens on without waking a task for each chunk."""

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
    """Additional interface of an engine that passes its chunks to a callback on the event loop."""

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample a continuation; return the finish reason, or None if the engine gave none. Raises like `generate`.

        `take` is called for each chunk. Its exceptions are propagated.
        """


Sample = Callable[[GenerateRequest, TakeChunk], Awaitable[FinishReason | None]]
"""`CallbackEngine.sample`."""


def sampler(engine: Engine) -> Sample:
    """A function that samples from an engine with a callback, whether or not it is a CallbackEngine."""
    return engine.sample if isinstance(engine, CallbackEngine) else partial(_read, engine)


async def _read(engine: Engine, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            finish = take(chunk) or chunk.finish
            if finish is not None:
                return finish
    return None


async def generated(sample: Sample, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    """Yield the chunks that `sample` passes to its callback. Closing the generator cancels `sample`."""
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
