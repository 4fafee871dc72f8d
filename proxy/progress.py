"""What takes time while a server or a command starts: one line each, at log level `info`.

A server writes them like all lines of its log; other commands call `show_steps` for the words alone.
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
"""Seconds from which on it is told how long a step took."""

_EVERY_S = 10.0
"""Seconds between two lines that tell how far a step is."""


def step(text: str) -> None:
    """Say what is done next."""
    _log.info(text)


def warn(message: str | None) -> None:
    """Say what the operator should change, if anything."""
    if message is not None:
        _log.warning(message)


@contextmanager
def doing(text: str, so_far: Callable[[], str] | None = None) -> Iterator[None]:
    """Say what is done in the block, from time to time `so_far`, and how long it took if it took long."""
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
    """Writes lines to what is stderr at that time, which may change within a process."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


def hide_steps() -> None:
    """Show no more of them: another process of the same server does."""
    _log.setLevel(logging.WARNING)
