"""An expected failure of a command: one line on stderr and exit code 1. It names the flags of keys, not headers."""

from __future__ import annotations

import sys
from typing import NoReturn

from tokengrove.errors import Forbidden, ProxyError, Unauthorized


def fail(message: str) -> NoReturn:
    """Print `message` on stderr and exit with code 1."""
    print(f"tokengrove: {message}", file=sys.stderr)
    sys.exit(1)


def fail_as(error: ProxyError, url: str) -> NoReturn:
    """Fail with the error of the server at `url`, which was called with the admin key of the command."""
    from tokengrove.client import ServerUnreachable

    fail(error.message if isinstance(error, ServerUnreachable) else f"{url}: {message_of(error)}")


def message_of(error: ProxyError) -> str:
    """The message of an error of a server that a command called with its admin key."""
    if isinstance(error, Unauthorized):
        return "the server needs its admin key: give --admin-key KEY, or set TOKENGROVE_ADMIN_KEY"
    if isinstance(error, Forbidden) and "needs the admin key" in error.message:
        return "--admin-key (or TOKENGROVE_ADMIN_KEY) is not the admin key of this server"
    return error.message
