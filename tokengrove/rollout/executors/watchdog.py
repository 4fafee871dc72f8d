"""Kills the process groups that it was told about when the program that told it is gone, however it ended.

`python watchdog.py` is started beside the workers of a program. It reads `+PID` and `-PID`, one a line, until its input
ends. Workers notice the end of the program themselves, unless they are stopped or an extension in C holds them.
It needs nothing but the standard library, to start at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def groups(lines: Iterable[str]) -> set[int]:
    """The groups that are left at the end of the input."""
    left: set[int] = set()
    for line in lines:
        (left.add if line.startswith("+") else left.discard)(int(line[1:]))
    return left


if __name__ == "__main__":
    for group in groups(sys.stdin):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
