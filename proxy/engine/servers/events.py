"""The log lines about engine servers. A server that repeatedly joins and leaves does not flood the log.

A reason may quote a server's answer to a turn, so texts are removed from it.

Each server gets a few lines per minute. Further lines are counted and summarised in one line at the end of the minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from proxy.telemetry.log_lines import without_texts

logger = logging.getLogger(__name__)

_MINUTE_S = 60.0
_LINES = 4
"""The maximum number of lines per server and minute."""

_LOST_EVERY_S = 10.0


@dataclass(slots=True)
class _Minute:
    """The `count` of lines of one server since `began`. Lines beyond `_LINES` were not written."""

    began: float
    count: int = 0
    last: str = ""


class ServerEvents:
    """The log lines of one pool. `quiet`: another process logs the same servers, so lines are logged at level debug."""

    def __init__(self, quiet: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock = quiet, clock
        self._minutes: dict[str, _Minute] = {}
        self._lost: Counter[str] = Counter()
        self._lost_why: dict[str, str] = {}
        self._lost_told_at = clock()
        self._down_since: float | None = None

    def info(self, event: str, server: str, **fields: object) -> None:
        """Log an improvement of a server."""
        self._tell(logging.INFO, event, server, fields)

    def warning(self, event: str, server: str, **fields: object) -> None:
        """Log a problem of a server."""
        self._tell(logging.WARNING, event, server, fields)

    def lost(self, server: str, why: str) -> None:
        """Count a request that a server lost or failed, and that is resubmitted."""
        self._lost[server] += 1
        self._lost_why[server] = without_texts(why)

    def alive(self, alive: bool, why: str) -> None:
        """Note whether any server takes requests. `why`: the reason why none does, or the first server that is back."""
        if alive == (self._down_since is None):
            return
        if alive:
            down_s = self._clock() - (self._down_since or 0.0)
            self._down_since = None
            self._tell(logging.INFO, "engine servers are back", "", {"first": why, "down_s": round(down_s, 3)})
        else:
            self._down_since = self._clock()
            self._tell(logging.ERROR, "all engine servers are down", "", {"reason": why})

    def sweep(self) -> None:
        """Log the lines that were only counted, once their interval is over. Call it about every second."""
        now = self._clock()
        if self._lost and now - self._lost_told_at >= _LOST_EVERY_S:
            self._lost_told_at = now
            for server, count in self._lost.items():
                fields = {"server": server, "requests": count, "reason": self._lost_why[server]}
                logger.warning("engine server lost requests, which are submitted again", fields)
            self._lost.clear()
            self._lost_why.clear()
        for server, minute in list(self._minutes.items()):
            if now - minute.began >= _MINUTE_S:
                del self._minutes[server]
                if minute.count > _LINES:
                    changes = {"server": server or None, "changes": minute.count, "latest": minute.last}
                    logger.warning("engine server keeps changing", changes)

    def _tell(self, level: int, event: str, server: str, fields: dict[str, object]) -> None:
        if "reason" in fields:
            fields["reason"] = without_texts(str(fields["reason"]))
        if self._quiet():
            logger.debug(event, {"server": server or None, **fields})
            return
        minute = self._minutes.setdefault(server, _Minute(self._clock()))
        minute.count, minute.last = minute.count + 1, event
        if minute.count <= _LINES:
            logger.log(level, event, {"server": server or None, **fields})
