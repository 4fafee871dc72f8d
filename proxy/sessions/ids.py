"""What may be a session's id: it stands in paths before our own words, and in logs and file names after them."""

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
    """Whether `text` is made as ids are; longer ones and reserved words included."""
    return _ID_PATTERN.fullmatch(text) is not None


def check_session_id(value: Any, name: str = "session_id") -> str:
    """`value` if it can be a session id. Raises InvalidRequest that says the rule."""
    if not isinstance(value, str) or not _ID_PATTERN.fullmatch(value):
        raise InvalidRequest(f"'{name}' must be word characters and . ~ : @ + - in parts joined by /", param=name)
    if len(value.encode()) > MAX_ID_BYTES:
        raise InvalidRequest(f"'{name}' is longer than {MAX_ID_BYTES} bytes", param=name)
    if value.split("/", 1)[0] in _RESERVED:
        raise InvalidRequest(f"'{name}' must not begin with the reserved word {value.split('/', 1)[0]!r}", param=name)
    return value
