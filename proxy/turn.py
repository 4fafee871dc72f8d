"""One generation under way. A client sees the end of it only after the commit.

`deltas` may be read by several clients at once, from the beginning: a retry attaches to the same generation.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from proxy.errors import EngineFailed
from proxy.rendering.output_parser import OutputParser
from proxy.sessions import Session
from proxy.trajectory.cache import Match
from proxy.trajectory.matching import Identity, request_hash
from proxy.trajectory.purpose import hinted
from proxy.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    Ids,
    Interaction,
    Message,
    Reason,
    Role,
    Status,
    TokenChunk,
    ToolCallStart,
    TurnRequest,
    ids_of,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids for the engine, and the parent that they are meant to continue. `bridged` False: rendered in full."""

    ids: Ids
    match: Match
    identity: Identity
    bridged: bool


@dataclass(slots=True, eq=False)
class Turn:
    """One generation and what was made of it so far. Clients read `deltas`; the last of them leaving ends it."""

    interaction: Interaction
    request: TurnRequest
    session: Session
    prompt: Prompt
    generate: GenerateRequest
    parser: OutputParser
    deltas: list[Delta] = field(default_factory=list)
    committing: bool = False
    task: asyncio.Task[Interaction] | None = None
    readers: int = 0
    _held: list[Delta] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def result(self) -> Interaction:
        """The committed interaction. Raises the ProxyError that ended the turn."""
        assert self.task is not None
        return await asyncio.shield(self.task)

    async def stream(self, patience_s: float) -> AsyncIterator[list[Delta]]:
        """The deltas in batches as they come, an empty batch after `patience_s` without one.

        Ends when the turn is committed; raises the ProxyError that ended it otherwise.
        """
        assert self.task is not None
        seen = 0
        while True:
            if seen < len(self.deltas):
                batch = self.deltas[seen:]
                seen += len(batch)
                yield batch
            elif self.task.done():
                self.task.result()
                return
            elif not await self._wait(patience_s):
                yield []

    async def _wait(self, patience_s: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(patience_s):
                return await self._changed.wait()
        except TimeoutError:
            return False

    def take(self, chunk: TokenChunk) -> FinishReason | None:
        """Add a chunk; what follows an end token or a complete stop string never gets in.

        Returns why sampling ends here, None while it goes on. Raises EngineFailed for an inconsistent chunk.
        """
        _check_chunk(chunk)
        interaction, parser = self.interaction, self.parser
        if chunk.cached_tokens is not None:
            interaction.cached_tokens = chunk.cached_tokens
        ids, ended = _until_end(chunk.ids, self.generate.stop_token_ids)
        already = len(interaction.output_ids)
        if ids and not already:
            interaction.first_token_at = time.time()
        deltas = parser.feed(ids)
        stopped = parser.stop_string is not None
        self._append(ids[: parser.kept - already] if stopped else ids, chunk)
        self.publish(deltas)
        if stopped:
            return FinishReason.STOP_STRING
        return FinishReason.STOP if ended else chunk.finish

    def _append(self, ids: Ids, chunk: TokenChunk) -> None:
        if not ids:
            return
        interaction = self.interaction
        interaction.output_ids += ids
        interaction.logprobs += chunk.logprobs[: len(ids)]
        *runs, last = interaction.versions or ((0, chunk.version),)
        if last[1] == chunk.version:
            interaction.versions = (*runs, (last[0] + len(ids), chunk.version))
        else:
            interaction.versions = (*runs, last, (len(ids), chunk.version))

    def publish(self, deltas: list[Delta]) -> None:
        """Pass deltas on, or hold them: a client may act on a closed call, so the commit comes first."""
        for delta in deltas:
            if self._held or isinstance(delta, ToolCallStart):
                self._held.append(delta)
            else:
                self.deltas.append(delta)
        self._changed.set()

    def release(self) -> None:
        """Let go what was held: the turn is committed."""
        self.deltas += self._held
        self._held.clear()
        self._changed.set()

    def wake(self) -> None:
        """Let readers look again: the task has ended."""
        self._changed.set()


def begin_interaction(interaction_id: str, session_id: str, request: TurnRequest, prompt: Prompt) -> Interaction:
    """The interaction of a turn that begins now; the tree and the tokens come at its end."""
    parent = prompt.match.parent
    return Interaction(
        id=interaction_id,
        session_id=session_id,
        parent_id=parent.interaction.id if parent is not None else None,
        aligned=False,
        reason=Reason.NEW_ROOT,
        api=request.api,
        status=Status.BEGUN,
        new_messages=prompt.match.new_messages(request.messages),
        output=Message(Role.ASSISTANT),
        prefix_length=0,
        prompt_suffix=ids_of(),
        output_ids=ids_of(),
        logprobs=array("f"),
        versions=(),
        finish_reason=None,
        sampling=request.sampling,
        tools=request.tools if parent is None else (),
        template_options=request.template_options if parent is None else {},
        model=request.model,
        state_hash=request.state_hash,
        purpose=request.purpose or hinted(request),
        agent=request.agent,
        request_hash=request_hash(request, prompt.identity),
        notes={"dropped": list(request.dropped)} if request.dropped else {},
        created_at=time.time(),
    )


def _check_chunk(chunk: TokenChunk) -> None:
    if len(chunk.ids) != len(chunk.logprobs):
        raise EngineFailed(f"the engine gave {len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens")
    if not all(map(math.isfinite, chunk.logprobs)):
        raise EngineFailed("the engine gave a logprob that is not a finite number")


def _until_end(ids: Ids, stop_token_ids: tuple[int, ...]) -> tuple[Ids, bool]:
    """`ids` up to and with the first end token, and whether there was one."""
    for index, token in enumerate(ids):
        if token in stop_token_ids:
            return ids[: index + 1], True
    return ids, False
