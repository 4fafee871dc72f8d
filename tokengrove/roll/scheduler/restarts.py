"""Decides whether a failed environment or worker process is restarted."""

from __future__ import annotations

FAILURES = 3
"""The number of failures in a row, without a result, after which there is no restart."""


class Restarts:
    """Counts the failures in a row of one environment or process."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._results = 0

    def allowed(self, results: int) -> bool:
        """Count a failure; return whether a restart is allowed. `results`: the number of results that were put."""
        self.in_a_row = 1 if results > self._results else self.in_a_row + 1
        self._results = results
        return self.in_a_row < FAILURES
