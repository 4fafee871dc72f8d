"""Returns freed memory to the system. Otherwise glibc keeps the memory that a large request has freed forever."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

_DELAY_S = 1.0
_STATM = Path("/proc/self/statm")
_RESIDENT_PAGES = 1
# From glibc's malloc.h. Python's threads seldom allocate at the same time, and only two threads encode text.
_M_ARENA_MAX, _MOST_ARENAS = -8, 1


def resident_bytes() -> int:
    """The resident memory of this process in bytes; 0 on a system that does not report it."""
    try:
        return int(_STATM.read_text().split()[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # not Linux
        return 0


def return_freed_memory() -> None:
    """Return freed memory to the system."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def limit_arenas() -> None:
    """Make threads that start from now on share one arena. Memory freed in arenas of their own would stay there."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MOST_ARENAS)


class FreedMemory:
    """Returns freed memory some time after work that used much of it. Use it on one event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Note that much memory is about to be freed. It is returned once a second has passed without another call."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_DELAY_S, loop.run_in_executor, None, return_freed_memory)
