"""Protection of the root logger during imports: gem configures it, which is up to the program."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_root_logger() -> Iterator[None]:
    """Restore the handlers and the level of the root logger after the block."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
