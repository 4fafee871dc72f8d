"""Rules of session ids. An id is the first part of URL paths, and part of log lines and file names."""

from __future__ import annotations

import re
from typing import Any

from proxy.errors import InvalidRequest

MAX_ID_BYTES = 200
_ID_PATTERN = re.compile(r"[\w.~:@+-]+(/[\w.~:@+-]+)*")
_RESERVED = frozenset(
    {
        *("v1", "rl", "engine", "mailbox", "trajectories", "ui", "health", "ready", "metrics", "export_trajectories"),
        *("grant_capacity",),
    }
)


def is_session_id(text: str) -> bool:
    """Return True if `text` has the characters of an id; its length and reserved words are not checked."""
    return _ID_PATTERN.fullmatch(text) is not None


def check_session_id(value: Any, name: str = "session_id") -> str:
    """Return `value` if it may be a session id. Raises InvalidRequest that states the rule."""
    if not isinstance(value, str) or not _ID_PATTERN.fullmatch(value):
        raise InvalidRequest(f"'{name}' must be word characters and . ~ : @ + - in parts joined by /", param=name)
    if len(value.encode()) > MAX_ID_BYTES:
        raise InvalidRequest(f"'{name}' is longer than {MAX_ID_BYTES} bytes", param=name)
    first, _, _ = value.partition("/")
    if first in _RESERVED:
        raise InvalidRequest(f"'{name}' must not begin with the reserved word {first!r}", param=name)
    return value
