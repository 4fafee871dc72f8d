"""One choice of a reply as the endpoints read it: a `Turn` that is being generated, or a `ReplayedTurn`.

A reader sees the end of a choice only after its commit. The choices of one reply are committed in the order of their
indexes, once all of them have been sampled or have failed. The commit assigns the number of a turn, which never
changes, so numbers do not depend on which choice was sampled first.
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
        """The interaction that the choice records; complete once it is the result of `ended`."""

    @property
    def attempt(self) -> Attempt:
        """The attempt that all choices of the reply belong to."""

    @property
    def prompt_tokens(self) -> int:
        """The length of the whole prompt in tokens."""

    @property
    def prompt_ids(self) -> Ids:
        """The ids of the whole prompt. Callers must not change them."""

    @property
    def deltas(self) -> Sequence[Delta]:
        """The deltas that readers may see so far; all deltas once the choice has been committed."""

    @property
    def watchers(self) -> list[Callable[[], None]]:
        """Callbacks that are called when `deltas` has grown; readers add and remove their own."""

    @property
    def ended(self) -> asyncio.Future[Interaction]:
        """Done after the commit, or failed with the ProxyError that ended the choice."""

    def answer(self) -> Answer:
        """Return the committed choice. Raises the ProxyError that ended it. Call it only once `ended` is done."""


class ChoiceOrder:
    """Makes the choices of one reply wait until all have ended, then wakes them by index. Not thread-safe."""

    def __init__(self, number: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = set(range(number))
        self._gates = [self._loop.create_future() for _ in range(number)]

    def end(self, index: int) -> None:
        """Note that a choice has been sampled or has failed. Further calls have no effect."""
        if index in self._running:
            self._running.remove(index)
            if not self._running:
                # Not immediately: the choice that ends last must first wait at its own gate, behind lower indexes.
                self._loop.call_soon(self._open)

    async def pass_through(self, index: int) -> None:
        """Note that a choice has been sampled, and wait until it may be committed."""
        self.end(index)
        await self._gates[index]

    def _open(self) -> None:
        """Wake the choices by index. They run in this order; each first waits at its commit."""
        for gate in self._gates:
            if not gate.done():  # a gate is cancelled with its waiter when the event loop ends
                gate.set_result(None)
