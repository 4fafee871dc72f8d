"""The root logger while a module is imported: gem sets it up, and a program's log lines are the program's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_root_logger() -> Iterator[None]:
    """Leave the handlers and the level of the root logger as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
