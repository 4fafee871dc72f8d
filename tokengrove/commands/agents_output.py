"""Keeps standard output for what a command has to say: what agents print goes to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_OUTPUT, _ERROR = 1, 2


@contextmanager
def agents_on_stderr() -> Iterator[None]:
    """While the block runs, what this process and those that it starts write to stdout comes out on stderr.

    An agent may close or replace `sys.stdout`: afterwards there is one that can be written again.
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
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stdout.flush()
