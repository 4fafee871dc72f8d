"""Whether an environment, or a worker's process, that failed is started again."""

from __future__ import annotations

FAILURES = 3
"""So many failures in a row without a result are the last."""


class Restarts:
    """Counts the failures of one environment or process."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._results = 0

    def allowed(self, results: int) -> bool:
        """Count a failure; return whether it may be started again. `results`: how many results it has put so far."""
        self.in_a_row = 1 if results > self._results else self.in_a_row + 1
        self._results = results
        return self.in_a_row < FAILURES
