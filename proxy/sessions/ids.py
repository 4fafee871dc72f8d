"""Rules of session ids. An id is the first part of URL paths, and part of log lines and file names."""

from __future__ import annotations

import re
from typing import Any

from tokengrove.errors import InvalidRequest, brief

MAX_ID_BYTES = 200
_ID_PATTERN = re.compile(r"[\w.~:@+-]+(/[\w.~:@+-]+)*")
_RESERVED = frozenset(
    {
        *("v1", "rl", "engine", "mailbox", "trajectories", "ui", "health", "ready", "metrics", "export_trajectories"),
        *("grant_capacity",),
    }
)


def is_session_id(text: str) -> bool:
    """Return True if `text` has the characters of an id; its length, dots and reserved words are not checked."""
    return _ID_PATTERN.fullmatch(text) is not None


def check_dots(text: str, name: str = "session_id") -> str:
    """Return `text` if no part of it is `.` or `..`. Raises InvalidRequest.

    Clients and proxies resolve such parts in a URL, so the request would reach another session.
    """
    if "." in text and not {".", ".."}.isdisjoint(text.split("/")):
        raise InvalidRequest(f"'{name}' must not have the part . or .., which clients take out of a URL", param=name)
    return text


def check_session_id(value: Any, name: str = "session_id") -> str:
    """Return `value` if it may be a session id. Raises InvalidRequest, which states the rule."""
    if not isinstance(value, str) or not _ID_PATTERN.fullmatch(value):
        raise InvalidRequest(f"'{name}' must be word characters and . ~ : @ + - in parts joined by /", param=name)
    if len(value.encode()) > MAX_ID_BYTES:
        raise InvalidRequest(f"'{name}' is longer than {MAX_ID_BYTES} bytes", param=name)
    if value[0] == "~":
        raise InvalidRequest(f"'{name}' must not begin with ~: in an address a key follows it", param=name)
    first, _, _ = (check_dots(value, name) if "." in value else value).partition("/")
    if first in _RESERVED:
        raise InvalidRequest(f"'{name}' must not begin with the reserved word {brief(first)}", param=name)
    return value
