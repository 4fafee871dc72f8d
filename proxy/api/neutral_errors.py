"""What agents are told of a failure behind the server: no address, socket or path of the machines there, and nothing of
what an engine answered.

Administrators read the whole error: in the replies of their own endpoints, in the session's tree and in the log.
"""

from __future__ import annotations

import re

from tokengrove.errors import EngineFailed, EngineLost, EngineUnavailable, ProxyError, StoreUnavailable

_ADMINISTRATION = (
    *("/engine", "/mailbox/", "/trajectories/", "/export_trajectories", "/rl/sessions", "/rl/start_session"),
    *("/rl/grant_capacity", "/grant_capacity"),
)
"""What the paths of endpoints begin with that want the admin key before they do anything."""

# URLs, IP addresses, host names and sockets in the words of drivers, absolute paths other than those of this API.
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
    (ProxyError, "the server failed"),
)


def is_administration(path: str) -> bool:
    """Whether only administrators come past the beginning of the endpoint at `path`."""
    return path.startswith(_ADMINISTRATION)


def neutral(error: ProxyError) -> ProxyError:
    """The same error, or one of its class that names no place and quotes nothing; the log has the whole text then."""
    told = error.shown
    if told is None:
        if error.status < 500 or not _PLACE.search(error.message):
            return error
        told = next(text for kind, text in _NEUTRAL if isinstance(error, kind))
    shown = type(error).__new__(type(error))  # a class may make its message of other arguments
    shown.__dict__.update(error.__dict__)
    shown.message = f"{told}; the server's log has the reason"
    shown.args = (shown.message,)
    return shown
