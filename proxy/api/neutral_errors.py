"""Error messages for agents about failures behind the server, without addresses, sockets, paths and engine answers.

Administrators see the full error: in the replies of their own endpoints, in the session's tree and in the log. At the
listener for agents (`--agent-port`), which strangers may reach, messages also have no engine names, flags or numbers of
the server.
"""

from __future__ import annotations

import re

from starlette.types import Scope

from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineTimeout,
    EngineUnavailable,
    ProxyError,
    StoreUnavailable,
    TooManyConnections,
    TooManyRequests,
    UpstreamFailed,
)

OUTSIDE = "tokengrove.outside"
"""The key that marks the ASGI scope of a request at the listener for agents."""

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
    (EngineTimeout, "the engine took too long"),
    (TooManyConnections, "too many connections are open; try again"),
    (TooManyRequests, "too many requests; try again"),
    (ProxyError, "the server failed"),
)


# What a stranger may not learn from an error that is not about his request: numbers of the server, flags and names.
_ENGINE = re.compile(
    r"\b(?:the|this) engine (?:'[^']*'|\"[^\"]*\"|\([^)]*\))|\b(?:sglang|vllm|transformers)\b", re.IGNORECASE
)
_FLAG = re.compile(r"[;,]?(?: raise the limit with| or)? \(?--[a-z][a-z-]+\)?")
_INNER = re.compile(r"\d|--[a-z]")


def shown_to(scope: Scope, error: ProxyError) -> ProxyError:
    """The error as the sender of this request may see it."""
    if OUTSIDE in scope:
        return outside(error)
    return error if is_administration(scope["path"]) else neutral(error)


def is_administration(path: str) -> bool:
    """Whether the endpoint at `path` is for administrators only."""
    return path.startswith(_ADMINISTRATION)


def neutral(error: ProxyError) -> ProxyError:
    """The same error, or one of its class without addresses or quoted answers; the log then has the full text."""
    message = error.shown
    if message is None:
        if error.status < 500 or not _PLACE.search(error.message):
            return error
        message = next(text for kind, text in _NEUTRAL if isinstance(error, kind))
    return _with_message(error, f"{message}; the server's log has the reason")


def outside(error: ProxyError) -> ProxyError:
    """The same error, or one of its class that tells nothing of the server and its engine."""
    error = neutral(error)
    message = error.message
    about_server = error.status == 429 or (error.status >= 500 and not isinstance(error, EngineIncapable))
    if about_server and (_INNER.search(message) or _ENGINE.search(message)):
        message = next(text for kind, text in _NEUTRAL if isinstance(error, kind))
    else:
        message = _FLAG.sub("", _ENGINE.sub("the engine", message))
    return error if message == error.message else _with_message(error, message)


def _with_message(error: ProxyError, message: str) -> ProxyError:
    shown = type(error).__new__(type(error))  # a class may build its message from other arguments
    shown.__dict__.update(error.__dict__)
    shown.message, shown.args = message, (message,)
    return shown
