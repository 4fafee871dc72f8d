"""Request headers in ASGI form, and the key and session hint of the caller in them.

Clients of Google's API may send their key in the address (`?key=`). It then counts as their header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import orjson
from starlette.types import Scope

from proxy.api.answers import is_google_path
from proxy.sessions.ids import check_session_id
from tokengrove.errors import InvalidRequest

Headers = Mapping[bytes, str]
"""Headers by lower-case name. Of a repeated header, the first one counts."""

# In order of preference. An opencode sub-agent has its own session, but belongs to its parent's.
_HINTS = (b"x-claude-code-session-id", b"session-id", b"x-parent-session-id", b"x-session-id")


_GOOGLE_KEY = b"x-goog-api-key"


def headers_of(scope: Scope) -> Headers:
    """The headers of a request."""
    headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
    if (query := scope.get("query_string")) and _GOOGLE_KEY not in headers and is_google_path(scope["path"]):
        for key in parse_qs(query.decode("latin-1")).get("key", ()):
            headers[_GOOGLE_KEY] = key
    return headers


def key_in(headers: Headers) -> str | None:
    """The key of a request, from `Authorization: Bearer`, else `x-api-key`, else `x-goog-api-key`."""
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (key := token.strip()):
        return key
    return headers.get(b"x-api-key") or headers.get(_GOOGLE_KEY) or None


def hint_in(headers: Headers, body: Any) -> str | None:
    """The client's own session id, from a header or the body; None if it sends no valid id."""
    values: list[Any] = [headers.get(name) for name in _HINTS]
    if isinstance(body, dict):
        values += [_metadata_session(body.get("metadata")), body.get("prompt_cache_key")]
    return next((value for value in values if _can_be_id(value)), None)


def sub_agent_in(headers: Headers) -> str | None:
    """The client's own session id of a sub-agent that names the session of its caller; None for any other request."""
    value = headers.get(b"x-session-id") if b"x-parent-session-id" in headers else None
    return value if _can_be_id(value) else None


def _metadata_session(metadata: Any) -> Any:
    """The session id of Claude Code, which sends it in `metadata.user_id`, a JSON string."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    try:
        decoded = orjson.loads(user) if isinstance(user, str) else None
    except orjson.JSONDecodeError:
        return None
    return decoded.get("session_id") if isinstance(decoded, dict) else None


def _can_be_id(value: Any) -> bool:
    try:
        return value is not None and bool(check_session_id(value))
    except InvalidRequest:
        return False
