"""The watchdog of this process. Each worker process is registered with it while it may run."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress

from tokengrove import initial_block
from tokengrove.rollout.executors import watchdog

_lock = threading.Lock()
_dog: tuple[int, subprocess.Popen[bytes]] | None = None


def watch(group: int) -> None:
    """Register a process group, to be killed when this process is gone."""
    _tell(f"+{group}\n")


def forget(group: int) -> None:
    """Remove a process group whose processes have ended: its number may be reused."""
    _tell(f"-{group}\n")


@atexit.register
def _end() -> None:
    """Let the watchdog kill the remaining groups, and wait until it has."""
    if _dog is not None and _dog[0] == os.getpid():
        process = _dog[1]
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _tell(line: str) -> None:
    global _dog
    with _lock:
        if _dog is None or _dog[0] != os.getpid():  # this process is a fork
            _dog = (os.getpid(), _started())
        pipe = _dog[1].stdin
        assert pipe is not None
        with suppress(OSError):  # the watchdog was killed; workers also notice the end themselves
            os.write(pipe.fileno(), line.encode())


def _started() -> subprocess.Popen[bytes]:
    # In its own session, because the group of this process may be killed with it.
    return subprocess.Popen(
        [sys.executable, "-E", "-S", watchdog.__file__],
        cwd="/",
        env=initial_block.without_secrets(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
