"""One choice of a reply as the endpoints read it: `Turn` while it is generated, `ReplayedTurn` when it is replayed.

A reader sees the end of a choice only after its commit. The choices of one reply are committed by index, once all of
them have been sampled or failed: the commit numbers a turn, and a number never changes, so numbers do not depend on
which choice was sampled first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta
from proxy.sessions.attempts import Attempt
from proxy.types import Ids, Interaction


class Choice(Protocol):
    """One of the `n` choices of a reply. Several clients may read it at once, each from its beginning."""

    @property
    def interaction(self) -> Interaction:
        """The interaction that the choice records; complete once `ended` holds it as a result."""

    @property
    def attempt(self) -> Attempt:
        """The attempt that all choices of the reply belong to."""

    @property
    def prompt_tokens(self) -> int:
        """The length of the whole prompt in tokens."""

    @property
    def prompt_ids(self) -> Ids:
        """The ids of the whole prompt, which nobody may change."""

    @property
    def deltas(self) -> Sequence[Delta]:
        """The deltas that readers may see so far; all of them once the choice has ended well."""

    @property
    def watchers(self) -> list[Callable[[], None]]:
        """Called whenever `deltas` has grown; readers add and remove theirs."""

    @property
    def ended(self) -> asyncio.Future[Interaction]:
        """Done after the commit, or with the ProxyError that ended the choice."""

    def answer(self) -> Answer:
        """Return the committed choice; call it after the end. Raises the ProxyError that ended it."""


class ChoiceOrder:
    """Holds the choices of one reply until all have ended, then lets them go on by index. Use it on the event loop."""

    def __init__(self, number: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = set(range(number))
        self._gates = [self._loop.create_future() for _ in range(number)]

    def end(self, index: int) -> None:
        """Note that a choice has been sampled or has failed; more than once is no error."""
        if index in self._running:
            self._running.remove(index)
            if not self._running:
                # Not at once: the last choice to end first has to wait at its own gate, behind those before it.
                self._loop.call_soon(self._open)

    async def pass_through(self, index: int) -> None:
        """End a choice that was sampled, and wait until it may be committed."""
        self.end(index)
        await self._gates[index]

    def _open(self) -> None:
        """Wake the choices by index. They run in this order, each until it first waits: at its commit."""
        for gate in self._gates:
            if not gate.done():  # the end of the event loop cancels what still waits
                gate.set_result(None)
