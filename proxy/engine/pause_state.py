"""The pause of the engine as this process knows it.

A pause passes through these states. An error or a cancellation ends it in any of them.

- Announced: the gates are about to close. Only the leading worker announces, since it closes the gates of all.
- Closed: new requests wait. Some requests in the engine may have to end before the pause is in force.
- In force: `paused` is the mode. The gate is closed, so the engine can be paused.
- Ending: the engine runs again, and new requests still wait. Only the leading worker notes this.
- Ended: requests are admitted.

Invariants: requests wait from `close` to `end`, and at no other time. A pause that was entered is in force until `end`.
The gate closes, enters and ends the pause; the leading worker announces it, and notes that it is ending. All others
only read.

An engine has its own state of what it has done. The state of a pool (`proxy.engine.servers.joining.PoolState`) is what
its servers have reached, and a joining server is brought to it. It changes once they have answered, is never DRAIN, and
differs from the pause while a pause begins or ends.
"""

from __future__ import annotations

import asyncio
import time

from proxy.engine.interface import PauseMode


class PauseState:
    """The state of the pause. Each gate has one.

    `admitting`: set while new requests are admitted. `paused`: the mode of the pause in force, or None. `since`: the
    monotonic time at which the latest pause came into force. `ending`: the engine runs again, so the pause is about to
    end, and news of it that are sent now may arrive after its end.
    """

    def __init__(self) -> None:
        self.admitting = asyncio.Event()
        self.admitting.set()
        self.paused: PauseMode | None = None
        self.since = 0.0
        self.ending = False
        self._announced: PauseMode | None = None

    @property
    def held(self) -> bool:
        """True while new requests wait for the end of a pause."""
        return not self.admitting.is_set()

    @property
    def told(self) -> PauseMode | None:
        """The mode of the pause that other workers must hold: one that is in force or about to be, and not ending."""
        return None if self.ending else self.paused or self._announced

    def announce(self, mode: PauseMode) -> None:
        """A pause is about to begin."""
        self._announced, self.ending = mode, False

    def close(self, mode: PauseMode) -> None:
        """New requests wait from now on."""
        self.announce(mode)
        self.admitting.clear()

    def enter(self, mode: PauseMode) -> None:
        """The pause is in force."""
        self.paused, self._announced, self.since = mode, None, time.monotonic()

    def end(self) -> None:
        """Admit requests again."""
        self.paused = self._announced = None
        self.ending = False
        self.admitting.set()
