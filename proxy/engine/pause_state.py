"""The pause of the engine as this process knows it: the only object that has its mode, its cause and its memory.

A pause passes through these states. If it fails or is cancelled before the engine is paused, it ends at once.

- Announced: the gates are about to close. Only the leading worker announces, since it closes the gates of all.
- Closed: new requests wait. Some requests in the engine may have to end before the pause is in force.
- In force: `paused` is the mode. The gate is closed, so the engine can be paused.
- Ending: the engine runs again, and new requests still wait. Only the leading worker notes this.
- Ended: requests are admitted.

Invariants: requests wait from `close` to `end`, and at no other time. A pause that was entered is in force until `end`.
Memory is released only while a pause is in force.

The gate closes, enters and ends the pause. The leading worker announces it, and notes that it is ending. The
administration of the engine notes which operation began it and when, and which memory is released. All others only
read.

An engine has its own state of what it has done. The state of a pool (`proxy.engine.servers.joining.PoolState`) is what
its servers have reached, and a joining server is brought to it. It changes once they have answered, is never DRAIN, and
differs from the pause while a pause begins or ends.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto

from proxy.engine.interface import PauseMode


class PausedBy(Enum):
    """The operation that began a pause, which decides what ends it.

    TRAINER: a pause, which the trainer ends. MEMORY: a release of memory; the pause ends once all memory is resumed.
    UPDATE: an update of weights; the pause ends with it.
    """

    TRAINER = auto()
    MEMORY = auto()
    UPDATE = auto()


class PauseState:
    """The state of the pause. Each gate has one.

    `admitting`: set while new requests are admitted. `held`: True while they wait for the end of a pause. `paused`: the
    mode of the pause in force, or None. `ending`: the engine runs again, so the pause is about to end, and news of it
    that is sent now may arrive after its end. `by`: the operation that began it. `since`: the monotonic time at which
    this process began its latest pause, or the start of this process for a pause that it took over. `released`: the
    kinds of memory (of MEMORY_TAGS) that are released.
    """

    def __init__(self) -> None:
        self.admitting = asyncio.Event()
        self.admitting.set()
        self.held = False
        self.paused: PauseMode | None = None
        self.since = time.monotonic()
        self.ending = False
        self.by = PausedBy.TRAINER
        self.released: frozenset[str] = frozenset()
        self._announced: PauseMode | None = None

    @property
    def shared(self) -> PauseMode | None:
        """The mode of the pause that a worker must hold if it starts now: in force or about to be, and not ending."""
        return None if self.ending else self.paused or self._announced

    @property
    def lasting(self) -> PauseMode | None:
        """The same, without a pause that ends with the current operation: it would outlive a leader that dies."""
        return None if self.by is PausedBy.UPDATE else self.shared

    def announce(self, mode: PauseMode) -> None:
        """A pause is about to begin."""
        self._announced, self.ending = mode, False

    def close(self, mode: PauseMode) -> None:
        """New requests wait from now on."""
        self.announce(mode)
        self.held = True
        self.admitting.clear()

    def enter(self, mode: PauseMode) -> None:
        """The pause is in force."""
        self.paused, self._announced = mode, None

    def end(self) -> None:
        """Admit requests again."""
        self.paused = self._announced = None
        self.ending, self.by, self.held = False, PausedBy.TRAINER, False
        self.admitting.set()

    def release(self, kinds: frozenset[str], *, begun: bool) -> None:
        """Memory is released. `begun`: the pause was begun for that."""
        self.released |= kinds
        if begun:
            self.by = PausedBy.MEMORY

    def restore(self, kinds: frozenset[str]) -> None:
        """Released memory is back."""
        self.released -= kinds
