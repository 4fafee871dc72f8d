"""The slow steps of the start of a server or a command: one log line per step, at level `info`.

A server writes these lines like all lines of its log. Other commands call `show_steps`, which prints only the text.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

_log = logging.getLogger("proxy.start")
_LONG_S = 1.0
"""The minimum duration in seconds of a step for which the duration is logged."""

_EVERY_S = 10.0
"""Seconds between lines with the progress of a step."""


def step(text: str) -> None:
    """Log the next step."""
    _log.info(text)


def warn(message: str | None) -> None:
    """Log a warning for the operator, unless `message` is None."""
    if message is not None:
        _log.warning(message)


@contextmanager
def doing(text: str, so_far: Callable[[], str] | None = None) -> Iterator[None]:
    """Log the step of the block, its progress from `so_far` at intervals, and its duration if it was long."""
    step(text)
    began = time.monotonic()
    with nullcontext() if so_far is None else _telling(text, so_far):
        yield
    took_s = time.monotonic() - began
    if took_s >= _LONG_S:
        _log.info("%(step)s took %(took_s).1f s", {"step": text, "took_s": round(took_s, 1)})


@contextmanager
def _telling(text: str, so_far: Callable[[], str]) -> Iterator[None]:
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_EVERY_S):
            step(f"{text}: {so_far()}")

    thread = threading.Thread(target=tell, name="tokengrove-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show_steps() -> None:
    """Show the steps of this process on stderr."""
    if not _log.handlers:
        _log.addHandler(_Stderr())
    _log.setLevel(logging.INFO)
    _log.propagate = False


class _Stderr(logging.Handler):
    """Writes lines to the current `sys.stderr`, which may change within a process."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


def hide_steps() -> None:
    """Stop logging steps in this process, since another process of the same server logs them."""
    _log.setLevel(logging.WARNING)
