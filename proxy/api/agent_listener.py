"""The ASGI app of the listener for agents on other machines (`--agent-port`), which strangers may reach.

It has the endpoints of agents alone, with access, body room and limits of their own. Its flood therefore takes no place
of the other listeners.
"""

from __future__ import annotations

import hmac
import re
import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proxy.api.http import JsonResponse, error_response, on_not_found
from proxy.api.neutral_errors import OUTSIDE
from proxy.api.turn_routes import App
from proxy.telemetry.http_request import HttpRequest
from tokengrove.errors import NotFound, TooManyRequests

PROBE = "probe"
"""A field of the query of `/health`, and of its answer: the proof that the request has reached this server."""

_HEALTH = "/health"
_TOKEN = re.compile(rb"probe=([0-9a-f]{32})")
_SECRET = secrets.token_bytes(32)  # workers are forked later, so all have the same


def proof_of(token: str) -> str:
    """What `/health` answers to a probe with this token."""
    return hmac.new(_SECRET, token.encode(), "sha256").hexdigest()


class AgentListener:
    """Marks each request as one from outside, and refuses those beyond `most` at once. `/health` does not count."""

    def __init__(self, app: App, most: int) -> None:
        self._app, self._most = app, most
        self.running = 0
        self.on_end = app.on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[OUTSIDE] = True
        if scope["path"] == _HEALTH and (probe := _TOKEN.fullmatch(scope["query_string"])) is not None:
            answer = JsonResponse({"status": "ok", PROBE: proof_of(probe[1].decode())})
            await answer(scope, receive, send)
        elif scope["path"] == _HEALTH:
            await self._app(scope, receive, send)
        elif self.running >= self._most:
            await self._refuse(scope, receive, send)
        else:
            self.running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self.running -= 1

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, self.on_end)
        error = TooManyRequests(
            f"{self._most} requests are running (--agent-max-requests); try again", retry_after_s=1.0
        )
        await error_response(scope, error)(scope, receive, send)
        request.end(scope)


async def no_endpoint(request: Request) -> Response:
    """The endpoint of paths that another route would match, but that have no endpoint here."""
    return await on_not_found(request, NotFound(""))
