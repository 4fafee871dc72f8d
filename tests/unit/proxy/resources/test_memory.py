"""The memory that the system gives to a server process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

ARENAS_OF_THREADS = """
import ctypes, threading
from proxy.resources.memory import limit_arenas

limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
ready = threading.Barrier(4)

def allocate():
    libc.malloc(1000)
    ready.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fdopen.argtypes, libc.fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
libc.malloc_info.argtypes, libc.fflush.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_the_threads_of_a_server_share_one_arena() -> None:
    """What a burst leaves in an arena of a thread is not used by others."""
    shown = subprocess.run([sys.executable, "-c", ARENAS_OF_THREADS], capture_output=True, text=True, check=True)
    assert shown.stdout.count("<heap nr=") == 1
