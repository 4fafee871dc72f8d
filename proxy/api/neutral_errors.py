"""Error messages for agents about failures behind the server, without addresses, sockets, paths and engine answers.

Administrators see the full error: in the replies of their own endpoints, in the session's tree and in the log.
"""

from __future__ import annotations

import re

from tokengrove.errors import EngineFailed, EngineLost, EngineUnavailable, ProxyError, StoreUnavailable, UpstreamFailed

_ADMINISTRATION = (
    *("/engine", "/mailbox/", "/trajectories/", "/export_trajectories", "/rl/sessions", "/rl/start_session"),
    *("/rl/grant_capacity", "/grant_capacity"),
)
"""The path prefixes of endpoints that check the admin key first."""

# URLs, IP addresses, host names and sockets in messages of drivers, and absolute paths other than those of this API.
_PLACE = re.compile(
    r"://|\b\d{1,3}(\.\d{1,3}){3}\b|\[[0-9a-f]*:[0-9a-f:.]*\]|::|\bsocket\b|\bhost( name)? \"|\bserver at\b"
    r"|(?<![\w.])/(?!(engine|rl|v1|mailbox|trajectories|ready|health)\b)[\w.-]+|\bfile \"",
    re.IGNORECASE,
)
_NEUTRAL: tuple[tuple[type[ProxyError], str], ...] = (
    (EngineLost, "the engine server that worked on this is lost"),
    (EngineUnavailable, "no engine server is available"),
    (EngineFailed, "the engine failed"),
    (StoreUnavailable, "the database is not available"),
    (UpstreamFailed, "the external model failed"),
    (ProxyError, "the server failed"),
)


def is_administration(path: str) -> bool:
    """Whether the endpoint at `path` is for administrators only."""
    return path.startswith(_ADMINISTRATION)


def neutral(error: ProxyError) -> ProxyError:
    """The same error, or one of its class without addresses or quoted answers; the log then has the full text."""
    told = error.shown
    if told is None:
        if error.status < 500 or not _PLACE.search(error.message):
            return error
        told = next(text for kind, text in _NEUTRAL if isinstance(error, kind))
    shown = type(error).__new__(type(error))  # a class may build its message from other arguments
    shown.__dict__.update(error.__dict__)
    shown.message = f"{told}; the server's log has the reason"
    shown.args = (shown.message,)
    return shown
