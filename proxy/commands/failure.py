"""Lines on stderr: an expected failure of a command, which ends it with exit code 1, and a warning."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Print `message` on stderr and exit with code 1."""
    print(f"tokengrove: {message}", file=sys.stderr)
    sys.exit(1)


def warn(message: str | None) -> None:
    """Print `message`, if any, on stderr."""
    if message is not None:
        print(f"tokengrove: warning: {message}", file=sys.stderr)
