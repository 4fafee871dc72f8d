"""How many sessions may start: `--max-live-sessions`, and the staleness rule of AReaL.

Staleness rule: at most (max staleness + weight version + 1) * batch size sessions may be live or accepted, so that no
session is trained on more than `--max-staleness` weight versions after it started.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.settings import Settings


class StartLimits:
    """The limits at this moment. `weight_version` returns the engine's current weight version."""

    def __init__(self, settings: Settings, weight_version: Callable[[], int]) -> None:
        self._settings, self._weight_version = settings, weight_version

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        settings = self._settings
        return settings.max_live_sessions is not None or settings.max_staleness is not None

    @property
    def max_live(self) -> int | None:
        """The most sessions that may be live at once; None: no limit."""
        return self._settings.max_live_sessions

    @property
    def max_taken(self) -> int | None:
        """The most sessions that may be live or ended without failing, by the staleness rule; None: no limit."""
        staleness, batch = self._settings.max_staleness, self._settings.batch_size
        return None if staleness is None or batch is None else (staleness + self._weight_version() + 1) * batch
