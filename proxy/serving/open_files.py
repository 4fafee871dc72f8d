"""The limit of open files of a process: raised to what is allowed, and how many connections fit into it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

MOST_CONNECTIONS = 8192
"""Connections of one process where the limit of open files allows more: each takes some kilobytes."""

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


def connections_within_limit(each: int) -> int:
    """How many clients may be connected, where each needs `each` descriptors, with the files that are open by now."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(_LEAST, (soft - len(os.listdir("/dev/fd")) - _RESERVED) // each))
