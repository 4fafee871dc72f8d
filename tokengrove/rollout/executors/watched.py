"""The watchdog of this process, which is told about each worker process while that may run."""

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
    """Let a process group be killed when this process is gone."""
    _tell(f"+{group}\n")


def forget(group: int) -> None:
    """The processes of the group have ended: the number may become that of others."""
    _tell(f"-{group}\n")


@atexit.register
def _end() -> None:
    """Let it kill what is left, and wait until it has."""
    if _dog is not None and _dog[0] == os.getpid():
        process = _dog[1]
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _tell(line: str) -> None:
    global _dog
    with _lock:
        if _dog is None or _dog[0] != os.getpid():  # a fork is another process
            _dog = (os.getpid(), _started())
        pipe = _dog[1].stdin
        assert pipe is not None
        with suppress(OSError):  # somebody has killed it: workers also look themselves
            os.write(pipe.fileno(), line.encode())


def _started() -> subprocess.Popen[bytes]:
    # A session of its own, since whoever ends this process may end its group.
    return subprocess.Popen(
        [sys.executable, "-E", "-S", watchdog.__file__],
        cwd="/",
        env=initial_block.without_secrets(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
