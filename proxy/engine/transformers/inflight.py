"""A request in flight in an engine that samples on another thread.

The batching thread only posts items, and the event loop of the request only reads them. The first item with a finish
reason, or the first error, is the end. Later items are never read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.transformers.adapter_files import Adapter
from proxy.engine.transformers.expert_rows import PendingExperts
from proxy.engine.transformers.prompt_scores import PromptScores
from proxy.engine.transformers.sampler import Drawn, SamplingRow
from proxy.engine.transformers.seen_prompt import SeenPrompt
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, Columns
from proxy.side_columns.kept_sets import kept_row
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.types import Ids, Logprobs, ids_of
from tokengrove.errors import ProxyError
from tokengrove.reasons import FinishReason

Item = TokenChunk | ProxyError


@dataclass(slots=True, eq=False)
class InFlight:
    """A request, its sampling state, and the queue to its event loop.

    `serial`: its id in the batch, which changes with each resubmission. `processed`: the number of prompt tokens that
    the model processed before the first token was sampled; the rest of the prompt came from the prefix cache.
    `finished`: no more tokens are sampled. `seen`: the prompt for the batch, if it has images. `experts`: those of its
    tokens, if they are recorded. `adapter`: the one that samples it, if any. `scores`: of its prompt, if requested.
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
    seen: SeenPrompt | None = None
    experts: PendingExperts | None = None
    adapter: Adapter | None = None
    scores: PromptScores | None = None

    def start_again(self) -> None:
        """Prepare for a resubmission, with an empty cache."""
        self.processed = 0
        if self.scores is not None:
            self.scores.start_again()
        if self.experts is not None:
            self.experts.start_again()

    def take(self, drawn: Drawn, base_version: int) -> TokenChunk:
        """Append a sampled token to the output; return its chunk. `base_version`: that of the base model's weights."""
        first, position = not self.output, len(self.request.prompt) + len(self.output)
        self.output.append(drawn.token)
        finish = self._finish_after(drawn.token)
        self.finished = finish is not None
        chunk = TokenChunk(
            ids=ids_of((drawn.token,)),
            logprobs=Logprobs("f", (drawn.logprob,)),
            version=self._version(base_version),
            finish=finish,
            unmasked=None if drawn.unmasked is None else Logprobs("f", (drawn.unmasked,)),
            top_logprobs=(drawn.top,) if self.request.top_logprobs else (),
            cached_tokens=max(len(self.request.prompt) - self.processed, 0) if first else None,
            columns=self._columns(drawn, position),
        )
        if self.scores is not None and first:
            chunk.prompt_logprobs, chunk.prompt_top = self.scores.logprobs, tuple(self.scores.tops)
        return chunk

    def _columns(self, drawn: Drawn, position: int) -> Columns | None:
        """The rows of a sampled token, and the experts of the tokens that were processed for it."""
        wanted, found = self.request.columns, dict[str, SideColumn]()
        if wanted is not None and drawn.kept is not None:
            logprob = SideRows(np.array([drawn.kept_logprob], np.float32))
            found[KEPT] = SideColumn(position, kept_row(drawn.kept, wanted.max_kept))
            found[KEPT_LOGPROBS] = SideColumn(position, logprob)
        if self.experts is not None and (experts := self.experts.take()) is not None:
            found[EXPERTS] = experts
        return found or None

    def aborted(self, base_version: int) -> TokenChunk:
        """The empty last chunk of an aborted request."""
        return TokenChunk(ids_of(), Logprobs("f"), self._version(base_version), FinishReason.ABORT)

    def _version(self, base_version: int) -> int:
        return base_version if self.adapter is None else self.adapter.version

    def _finish_after(self, token: int) -> FinishReason | None:
        if token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.row.remaining <= 0 else None

    def end(self, item: Item) -> None:
        """Post the last item. Callable from any thread."""
        post([(self, item)])

    async def next_chunk(self) -> TokenChunk:
        """Wait for the next chunk. Raises the error if one was posted."""
        item = await self.queue.get()
        if isinstance(item, ProxyError):
            raise item
        return item


def post(items: Iterable[tuple[InFlight, Item]]) -> None:
    """Post items to the event loops of their requests, in order, with one call per loop. Callable from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[InFlight, Item]]] = {}
    for flight, item in items:
        by_loop.setdefault(flight.loop, []).append((flight, item))
    for loop, batch in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no reader is left
            loop.call_soon_threadsafe(_put, batch)


def _put(batch: list[tuple[InFlight, Item]]) -> None:
    for flight, item in batch:
        flight.queue.put_nowait(item)
