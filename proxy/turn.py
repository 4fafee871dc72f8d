"""One generation under way. A client sees the end of it only after the commit.

`deltas` may be read by several clients at once, from the beginning: a retry attaches to the same generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from proxy.rendering.output_parser import OutputParser
from proxy.sessions import Session
from proxy.trajectory.cache import Match
from proxy.trajectory.matching import Identity
from proxy.types import Delta, GenerateRequest, Ids, Interaction, ToolCallStart, TurnRequest


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
