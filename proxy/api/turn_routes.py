"""Routes turns without Starlette's router, which tries one pattern after another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.answers import identified
from proxy.api.guard import Guard
from proxy.api.wrong_keys import WRONG_KEYS, WrongKeys
from proxy.telemetry.http_request import ROUTE, HttpRequest, MetadataOf, RequestEnd, request_of

_PREFIX = "/v1"


class TurnRoutes:
    """Finds the endpoint of a turn by the end of its path, such as `/responses`.

    It matches a subset of the requests that the routes of these endpoints match, with the same `path_params` and label.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp]) -> None:
        self._endpoints = tuple((end, _PREFIX + end, endpoint) for end, endpoint in endpoints.items())

    def find(self, scope: Scope) -> ASGIApp | None:
        """Return the endpoint, and set `path_params` and route; None for a request that may not be a turn."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return None
        path: str = scope["path"]
        for end, label, endpoint in self._endpoints:
            if path.endswith(end) and path[0] == "/" and "\n" not in path:
                prefix = path.removesuffix(end)
                scope["path_params"] = {} if prefix in ("", _PREFIX) else {"session": prefix.removesuffix(_PREFIX)[1:]}
                scope[ROUTE] = label
                return endpoint
        return None


class App(Starlette):
    """A Starlette application whose turns bypass its middleware and router. Its routes also include the turns.

    `guard`: checks requests first; None if there is nothing to check. `on_end`: gets the record of each ended request.
    `metadata_of`: finds the metadata of a session, for its log lines.
    `wrong_keys`: delays answers to wrong keys; None answers them at once.
    `running_loop`: the event loop that it runs on, from its start to its stop.
    """

    turn_routes = TurnRoutes({})
    guard: Guard | None = None
    on_end: RequestEnd | None = None
    metadata_of: MetadataOf | None = None
    running_loop: asyncio.AbstractEventLoop | None = None
    wrong_keys: WrongKeys | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        request = HttpRequest(scope, self.on_end, self.metadata_of)
        try:
            guard = self.guard
            if guard is not None and not guard.admits(scope):
                await guard(self._admitted, scope, receive, send)
            elif (endpoint := self.turn_routes.find(scope)) is not None:  # like `_admitted`, one call less deep
                scope[WRONG_KEYS] = self.wrong_keys
                await endpoint(scope, receive, send)
            else:
                await self._admitted(scope, receive, send)
        finally:
            request.end(scope)

    async def passed_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the guard of another worker, which does not log it."""
        request = HttpRequest(scope, self.on_end, self.metadata_of)
        try:
            await self._admitted(scope, receive, send)
        finally:
            request.end(scope)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[WRONG_KEYS] = self.wrong_keys
        if (endpoint := self.turn_routes.find(scope)) is not None:
            await endpoint(scope, receive, send)  # it records its status itself: no extra call per part of a stream
        else:
            await super().__call__(scope, receive, identified(scope, request_of(scope), send))
