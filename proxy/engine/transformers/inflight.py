"""One request on its way through an engine that samples on a thread of its own.

The batching thread only posts; the event loop that asked only reads. The first item with a finish, or the first error,
is the end: whatever is posted after it is never read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.transformers.sampler import Drawn, SamplingRow
from proxy.errors import ProxyError
from proxy.types import FinishReason, Ids, Logprobs, ids_of

Item = TokenChunk | ProxyError


@dataclass(slots=True, eq=False)
class InFlight:
    """A request, its sampling state, and the queue to the event loop that waits for it.

    `serial` names it in the engine and changes when it is submitted anew. `processed` counts the tokens of the prompt
    that went through the model before the first token was drawn.
    """

    request: GenerateRequest
    row: SamplingRow
    stop_token_ids: frozenset[int]
    serial: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    output: Ids = field(default_factory=ids_of)
    processed: int = 0
    finished: bool = False

    def take(self, drawn: Drawn, version: int) -> TokenChunk:
        """Note a drawn token, and give the chunk that tells of it."""
        first = not self.output
        self.output.append(drawn.token)
        finish = self._finish_after(drawn.token)
        self.finished = finish is not None
        return TokenChunk(
            ids=ids_of((drawn.token,)),
            logprobs=Logprobs("f", (drawn.logprob,)),
            version=version,
            finish=finish,
            top_logprobs=(drawn.top,) if self.request.top_logprobs else (),
            cached_tokens=max(len(self.request.input_ids) - self.processed, 0) if first else None,
        )

    def _finish_after(self, token: int) -> FinishReason | None:
        if token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.row.remaining <= 0 else None

    def end(self, item: Item) -> None:
        """Post the last item, from any thread."""
        post([(self, item)])

    async def next_chunk(self) -> TokenChunk:
        """Wait for the next chunk. Raises the error that was posted in its place."""
        item = await self.queue.get()
        if isinstance(item, ProxyError):
            raise item
        return item


def aborted(version: int) -> TokenChunk:
    """The empty last chunk of a request that was told to stop."""
    return TokenChunk(ids_of(), Logprobs("f"), version, FinishReason.ABORT)


def post(items: Iterable[tuple[InFlight, Item]]) -> None:
    """Hand items over to the event loops that wait for them: one call a loop, in order, from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[InFlight, Item]]] = {}
    for flight, item in items:
        by_loop.setdefault(flight.loop, []).append((flight, item))
    for loop, batch in by_loop.items():
        with suppress(RuntimeError):  # that loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_put, batch)


def _put(batch: list[tuple[InFlight, Item]]) -> None:
    for flight, item in batch:
        flight.queue.put_nowait(item)
