"""Reserves standard output for the output of commands: the output of agents goes to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
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
