"""Child processes that run code for this program: how they start, are killed, and have ended.

They are new processes, not forks: a fork of a program with threads may hang. Each leads its own process group, which is
killed as a whole. Child processes are killed with this program, however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from tokengrove import initial_block; initial_block.clear(); from {module} import main; main()"
)
_END_S = 5.0


def started(module: str, fd: int) -> subprocess.Popen[bytes]:
    """Start a Python process that calls `main` of `module`. It has the import path of this process.

    It inherits the file descriptor `fd`, its end of a connection to this process; the number is in `sys.argv[1]`.
    Raises OSError if the system cannot start it.
    """
    command = [sys.executable, "-c", _PROGRAM.format(module=module), str(fd), json.dumps(sys.path)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children. They may already have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def fate(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, for a sentence that begins with "the process".

    Waits up to 5 s for its end.
    """
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    memory = " (possibly because the system was out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"
