"""Reserves standard output for the output of commands: the output of agents goes to standard error."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_OUTPUT, _ERROR = 1, 2


@contextmanager
def agents_on_stderr() -> Iterator[None]:
    """Redirect stdout of this process and of its child processes to stderr while the block runs.

    An agent may close or replace `sys.stdout`. After the block, it is writable again.
    """
    try:
        kept = os.dup(_OUTPUT)
    except OSError:  # it is closed
        yield
        return
    _flush()
    before = sys.stdout
    os.dup2(_ERROR, _OUTPUT)
    try:
        yield
    finally:
        _flush()
        os.dup2(kept, _OUTPUT)
        os.close(kept)
        sys.stdout = os.fdopen(_OUTPUT, "w", closefd=False) if before.closed else before


def _flush() -> None:
    with suppress(OSError, ValueError):  # the reader has left
        sys.stdout.flush()


EVERY_S = 5.0
_LOGGER = "tokengrove.rollout"


class FewAlike(logging.Filter):
    """Passes one record per template every `every_s` seconds, with the number of records that were omitted."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s, self._clock = every_s, clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        template, now = str(record.msg), self._clock()
        if now < self._next.get(template, now):
            self._left_out[template] = self._left_out.get(template, 0) + 1
            return False
        self._next[template] = now + self._every_s
        if more := self._left_out.pop(template, 0):
            record.msg, record.args = f"{record.getMessage()} (and {more} more like it)", ()
        return True


@contextmanager
def few_warnings() -> Iterator[None]:
    """Show warnings of this process's episodes on stderr while the block runs."""
    logger, handler = logging.getLogger(_LOGGER), logging.StreamHandler()
    handler.addFilter(FewAlike())
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
