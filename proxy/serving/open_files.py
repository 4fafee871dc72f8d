"""The limit of open files of a process: raising it to the maximum, and the number of connections that it allows."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_RESERVED = 64
"""Descriptors for the database, temporary files of exports, and connections that only watch the server."""
_LEAST = 8


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, for this process and its children."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS accepts no more than OPEN_MAX, whatever it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(each: int) -> int:
    """The number of client connections, each with `each` descriptors, that fit beside the files that are open now."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(_LEAST, (soft - _open_files() - _RESERVED) // each)


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except (
        FileNotFoundError
    ):  # a minimal /dev, as in a chroot; the reserve has room for the files that are open at start
        return 0
