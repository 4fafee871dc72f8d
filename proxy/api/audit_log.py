"""One line for each control action: who changed the engine, replaced keys or deleted a session, and whether it worked.

A line has the action, its object, the authority, a fingerprint of the key (never the key), the client's address and the
HTTP status. Refused actions are logged like others. With several workers, the worker that performs the action writes
the line. It replaces the usual line of the request.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proxy.api.http import key_of
from proxy.sessions.access import Access
from proxy.sessions.keys import fingerprint
from proxy.telemetry.http_request import HttpRequest, request_of
from proxy.telemetry.log import AUDIT
from tokengrove.errors import ProxyError

Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(AUDIT)
_NOTED = "tokengrove.audit"


def note(request: Request, **what: Any) -> None:
    """Add fields to the line of a request: names and values that its endpoint has read. None values are omitted."""
    request.scope.setdefault(_NOTED, {}).update(what)


def audited(access: Access, action: str, endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint to log a line for each request when it is answered or has failed."""

    async def run(request: Request) -> Response:
        status, code = 499, None  # the client left
        try:
            response = await endpoint(request)
            status = response.status_code
            return response
        except ProxyError as error:
            status, code = error.status, error.code
            raise
        except Exception as error:
            status = status if isinstance(error, ClientDisconnect) else 500
            raise
        finally:
            _write(access, action, request, status, code)

    return run


def _write(access: Access, action: str, request: Request, status: int, code: str | None) -> None:
    key, noted, record = key_of(request), request.scope.get(_NOTED, {}), request_of(request.scope)
    if isinstance(noted.get("url"), str):
        noted["url"] = _without_login(noted["url"])
    record.tell = _told_already
    record.session = record.session or noted.get("session")
    _log.info(
        "audit",
        {
            "action": action,
            **noted,
            **record.labels,
            "by": access.right_of(key),
            "key": None if key is None else fingerprint(key),
            "client": _client_of(request),
            "status": status,
            "code": code,
            "request_id": record.name(),
        },
    )


def _told_already(record: HttpRequest) -> None:
    """Log nothing: the audit line is the line of its request."""


def _client_of(request: Request) -> str | None:
    return None if request.client is None else f"{request.client.host}:{request.client.port}"


def _without_login(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme + mark + rest.rpartition("@")[2]
