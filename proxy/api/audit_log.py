"""One line for each control action: who changed the engine, replaced keys or deleted a session, and whether it worked.

A line has the action, what it concerned, by whose right, a fingerprint of the key and never the key, the client's
address and the HTTP status. Text of clients is quoted and cut, so that no id or folder can begin a line of its own.
Refused actions are logged like others. With several workers, the one that carries an action out writes the line.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proxy.api.http import key_of
from proxy.errors import ProxyError
from proxy.sessions.access import Access
from proxy.sessions.keys import fingerprint

Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger("tokengrove.audit")
_NOTED = "tokengrove.audit"
_MOST_CHARACTERS = 200


def show_audit_lines() -> None:
    """Write the lines of this process, and of those that it forks, to stderr, whatever the log level."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ audit %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


def note(request: Request, **what: Any) -> None:
    """Say what a request is about, for its line: names and values that its endpoint has read. None is left out."""
    request.scope.setdefault(_NOTED, {}).update(what)


def audited(access: Access, action: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint, with a line for each request once it is answered or has failed."""

    async def run(request: Request) -> Response:
        status = 499  # the client left
        try:
            response = await endpoint(request)
            status = response.status_code
            return response
        except ProxyError as error:
            status = error.status
            raise
        except Exception as error:
            status = status if isinstance(error, ClientDisconnect) else 500
            raise
        finally:
            _write(access, action, request, status)

    return run


def _write(access: Access, action: str, request: Request, status: int) -> None:
    key, noted = key_of(request), request.scope.get(_NOTED, {})
    by = {"by": access.right_of(key), "key": None if key is None else fingerprint(key), "client": _client_of(request)}
    _log.info("%s %s", action, _shown({**noted, **by, "status": status}))


def _client_of(request: Request) -> str | None:
    return None if request.client is None else f"{request.client.host}:{request.client.port}"


def _shown(told: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_quoted(name, value)}" for name, value in told.items() if value is not None)


def _quoted(name: str, value: Any) -> str:
    """A value in one piece of ASCII without control characters; of an address, without user and password."""
    if name == "url" and isinstance(value, str):
        value = _without_login(value)
    try:
        text = json.dumps(value, separators=(",", ":"))
    except RecursionError:  # orjson reads deeper JSON than Python writes
        text = '"nested too deeply"'
    return text if len(text) <= _MOST_CHARACTERS else f'{text[:_MOST_CHARACTERS]}..."'


def _without_login(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.rpartition("@")[2]
