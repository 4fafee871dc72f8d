"""The limit of open files of a process: raised to what is allowed, and how many connections fit into it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_RESERVED = 64
"""Descriptors for the database, temporary files of exports, and connections that only watch the server."""
_LEAST = 8


def raise_limit() -> None:
    """Raise the soft limit to the hard one, for this process and those that it starts."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS takes no more than OPEN_MAX, whatever it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(each: int) -> int:
    """How many clients may be connected, where each needs `each` descriptors, with the files that are open by now."""
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
    ):  # a bare /dev, as a chroot may have it; the reserve has room for what is open at the start
        return 0
