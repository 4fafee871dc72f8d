"""The log lines of a stop: what it waits for, what it interrupts, and its result.

What it waits for is logged immediately, again when it has changed, at most once per second, and at least every five
seconds.
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
"""Seconds between checks of what still runs."""

_AGAIN_S = 5.0


class Left(NamedTuple):
    """What a stop waits for: running turns, exports in progress, and connections with a request."""

    turns: int = 0
    exports: int = 0
    connections: int = 0


class Ended(NamedTuple):
    """Turns that ended during a stop."""

    finished: int = 0
    interrupted: int = 0


class Stop:
    """Logs one stop, which may take `timeout_s` seconds. `clock` returns seconds."""

    def __init__(self, timeout_s: float, left: Left, clock: Callable[[], float] = time.monotonic) -> None:
        """Log that the stop begins, and what it waits for."""
        self._clock, self._said, self._said_at = clock, left, clock()
        self._ends_at = self._said_at + timeout_s
        if any(left):
            logger.info(f"stopping: {_named(left)}, up to %(limit_s)g s", {**_counts(left), "limit_s": timeout_s})
        else:
            logger.info("stopping: nothing runs")

    def look(self, left: Left) -> None:
        """Log what still runs, if it has changed or was not logged for a while."""
        now = self._clock()
        if any(left) and (left != self._said or now - self._said_at >= _AGAIN_S):
            self._said, self._said_at = left, now
            left_s = round(max(0.0, self._ends_at - now))
            logger.info(f"stopping: still {_named(left)}, up to %(left_s)d s more", {**_counts(left), "left_s": left_s})

    def at_once(self) -> None:
        """Log that a second signal ends the wait."""
        logger.warning("stopping at once: a second signal came")

    def interrupt(self, turns: int) -> None:
        """Log how many turns are interrupted, if any."""
        if turns:
            logger.warning(f"stopping: interrupted {_count('turns', turns)}", {"turns": turns})

    def end(self, ended: Ended) -> None:
        """Log that the server has stopped."""
        named = _count("finished", ended.finished, "turn")
        logger.info(f"stopped: {named} finished, %(interrupted)d interrupted", ended._asdict())


def end_at_signal() -> None:
    """Until the server has its own handlers, end this process immediately on SIGTERM or SIGINT, with exit code 0.

    Nothing has been answered yet, so nothing is lost, and loading cannot be interrupted otherwise.
    """
    for number in SIGNALS:
        signal.signal(number, _end_start)


def end_process() -> NoReturn:
    """End this process with exit code 0, after its exit handlers. Everything must be closed and written before.

    Otherwise the interpreter would free the objects of libraries one by one, which takes more than a second with torch.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(0)


def _end_start(number: int, _: FrameType | None) -> None:
    logger.info("stopped by %(signal)s during the start", {"signal": signal.Signals(number).name})
    logging.shutdown()
    os._exit(0)


def _counts(left: Left) -> dict[str, int]:
    return {name: count for name, count in left._asdict().items() if count}


def _named(left: Left) -> str:
    return ", ".join(_count(name, count) for name, count in _counts(left).items())


def _count(name: str, count: int, noun: str | None = None) -> str:
    """The field `name` in a sentence, with its noun: the name itself, in the singular for a count of one."""
    noun = noun or name.removesuffix("s")
    return f"%({name})d {noun}" if count == 1 else f"%({name})d {noun}s"
