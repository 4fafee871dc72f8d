"""Kills registered process groups when the program that registered them is gone, however it ended.

`python watchdog.py` is started beside the workers of a program. It reads lines `+PID` and `-PID` until its input ends.
Workers notice the end of the program themselves, unless they are stopped or a C extension blocks them. The watchdog
uses only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def groups(lines: Iterable[str]) -> set[int]:
    """The groups that remain at the end of the input."""
    left: set[int] = set()
    for line in lines:
        (left.add if line.startswith("+") else left.discard)(int(line[1:]))
    return left


if __name__ == "__main__":
    for group in groups(sys.stdin):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
