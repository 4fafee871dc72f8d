"""The time limit of one rollout: after it the session is closed, which ends the wait for its next request."""

from __future__ import annotations

import logging
import threading

from tokengrove.rollout.contract import AgentSession

_log = logging.getLogger(__name__)


class RolloutTimeout(Exception):
    """A rollout exceeded its time limit."""


class Clock:
    """Closes a session after its time limit, which ends the wait for its next request."""

    def __init__(self, session: AgentSession, timeout_s: float | None) -> None:
        self._over, self._timeout_s = False, timeout_s
        self._timer = None if timeout_s is None else threading.Timer(timeout_s, self._end, (session,))

    def __enter__(self) -> Clock:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def told(self, error: Exception) -> Exception:
        """`error`, or a RolloutTimeout if the time limit has caused it."""
        return RolloutTimeout(f"the rollout has not ended within {self._timeout_s:g} s") if self._over else error

    def check(self) -> None:
        """Raise RolloutTimeout after the time limit."""
        if self._over:
            raise self.told(RolloutTimeout())

    def _end(self, session: AgentSession) -> None:
        self._over = True
        close_session(session)


def close_session(session: AgentSession) -> None:
    """Close a session; its exceptions are logged."""
    try:
        session.close()
    except Exception:
        _log.warning("a session could not be closed", exc_info=True)
