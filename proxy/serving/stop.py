"""What a stop tells: what it waits for, whom it interrupts, and what it has done.

It says at once what it waits for, again when that has changed, at most once a second, and every five seconds anyway.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NamedTuple, NoReturn

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_S = 1.0
"""Seconds between two looks at what is left."""

_AGAIN_S = 5.0


class Left(NamedTuple):
    """What a stop waits for: turns that run, exports that are sent, and connections that have a request."""

    turns: int = 0
    exports: int = 0
    connections: int = 0


class Ended(NamedTuple):
    """Turns that ended during a stop."""

    finished: int = 0
    interrupted: int = 0


class Stop:
    """The lines of one stop, which may take `timeout_s` seconds. `clock` gives seconds."""

    def __init__(self, timeout_s: float, left: Left, clock: Callable[[], float] = time.monotonic) -> None:
        """Say that the stop begins, and what it waits for."""
        self._clock, self._said, self._said_at = clock, left, clock()
        self._ends_at = self._said_at + timeout_s
        logger.info("stopping: %s", f"{_listed(left)}, up to {timeout_s:g} s" if any(left) else "nothing runs")

    def look(self, left: Left) -> None:
        """Say what is left, if it has changed or was not said for a while."""
        now = self._clock()
        if any(left) and (left != self._said or now - self._said_at >= _AGAIN_S):
            self._said, self._said_at = left, now
            logger.info("stopping: still %s, up to %.0f s more", _listed(left), max(0.0, self._ends_at - now))

    def at_once(self) -> None:
        """Say that a second signal ends the wait."""
        logger.warning("stopping at once: a second signal came")

    def interrupt(self, turns: int) -> None:
        """Say how many turns are interrupted, if any are."""
        if turns:
            logger.warning("stopping: interrupted %s", _count(turns, "turn"))

    def end(self, ended: Ended) -> None:
        """Say that the stop is over."""
        logger.info("stopped: %s finished, %d interrupted", _count(ended.finished, "turn"), ended.interrupted)


def end_at_signal() -> None:
    """Until the server has its own handlers, end this process at once at SIGTERM or SIGINT, with exit code 0.

    Nothing has been answered yet that could be lost, and what is being loaded cannot be waited for.
    """
    for number in SIGNALS:
        signal.signal(number, _end_start)


def end_process() -> NoReturn:
    """End this process with exit code 0, after its exit handlers. All has been closed and written before.

    The interpreter would free what the libraries hold, object by object: with torch that takes more than a second.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(0)


def _end_start(number: int, _: FrameType | None) -> None:
    logger.info("stopped by %s during the start", signal.Signals(number).name)
    logging.shutdown()
    os._exit(0)


def _listed(left: Left) -> str:
    counts = zip(left, ("turn", "export", "connection"), strict=True)
    return ", ".join(_count(number, noun) for number, noun in counts if number)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
