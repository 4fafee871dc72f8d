"""How a command fails in a way that was foreseen: one line on stderr, and exit code 1."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Print `message` and exit."""
    print(f"tokengrove: {message}", file=sys.stderr)
    sys.exit(1)
