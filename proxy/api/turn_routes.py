"""The addresses of turns, found without Starlette's router, which tries one pattern after the other."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.guard import Guard

_PREFIX = "/v1"


class TurnRoutes:
    """Finds the endpoint of a turn by the end of its path, such as `/responses`.

    It recognises a subset of what the routes of the same endpoints match, with the same `path_params`.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp]) -> None:
        self._endpoints = tuple(endpoints.items())

    def find(self, scope: Scope) -> ASGIApp | None:
        """Return the endpoint and set `path_params`, or return None for a request that is not surely a turn."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return None
        path: str = scope["path"]
        for end, endpoint in self._endpoints:
            if path.endswith(end) and path[0] == "/" and "\n" not in path:
                prefix = path.removesuffix(end)
                scope["path_params"] = {} if prefix in ("", _PREFIX) else {"session": prefix.removesuffix(_PREFIX)[1:]}
                return endpoint
        return None


class App(Starlette):
    """A Starlette application that serves turns past its middleware and router. Its routes hold them all the same.

    `guard`: what requests pass before anything else; None if nothing has to be checked.
    """

    turn_routes = TurnRoutes({})
    guard: Guard | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.guard is not None and scope["type"] == "http":
            await self.guard(self.admitted, scope, receive, send)
        else:
            await self.admitted(scope, receive, send)

    async def admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the guard, here or in another worker."""
        await (self.turn_routes.find(scope) or super().__call__)(scope, receive, send)
