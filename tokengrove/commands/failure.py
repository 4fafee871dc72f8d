"""An expected failure of a command: one line on stderr and exit code 1."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Print `message` on stderr and exit with code 1."""
    print(f"tokengrove: {message}", file=sys.stderr)
    sys.exit(1)
