"""Routes turns without Starlette's router, which tries one pattern after another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.answers import identified
from proxy.api.guard import Guard
from proxy.api.wrong_keys import WRONG_KEYS, WrongKeys
from proxy.telemetry.http_request import ROUTE, HttpRequest, MetadataOf, RequestEnd, request_of

_PREFIX = "/v1"
_VERSIONS = ("/v1beta", "/v1alpha", "/v1")
_GOOGLE = "/models/{model:path}:"
"""The beginning of the ends of paths in Google's API, which name the model."""


def prefixes(end: str) -> tuple[str, ...]:
    """What may stand before an end of a path, in order of matching: a version, after a session or not, or no version.

    Some clients omit `/v1`: AReaL's workflow gives its agents the root URL of the server and a session's key.
    """
    versions = _VERSIONS if end.startswith(_GOOGLE) else (_PREFIX,)
    with_version = (prefix + version for version in versions for prefix in ("", "/{session:path}"))
    return (*with_version, "/{session:path}", "")


def label_of(end: str) -> str:
    """The name by which the requests to all paths with this end are counted."""
    return (_VERSIONS[0] if end.startswith(_GOOGLE) else _PREFIX) + end.replace(":path}", "}")


class TurnRoutes:
    """Finds the endpoint of a turn by the end of its path, such as `/responses`.

    It matches a subset of the requests that the routes of these endpoints match, with the same `path_params` and label.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp]) -> None:
        plain = {end: endpoint for end, endpoint in endpoints.items() if "{" not in end}
        self._endpoints = tuple((end, label_of(end), endpoint) for end, endpoint in plain.items())
        self._with_models = tuple(
            (
                end.rpartition("}")[2],
                [compile_path(prefix + end)[0] for prefix in prefixes(end)],
                label_of(end),
                endpoint,
            )
            for end, endpoint in endpoints.items()
            if end not in plain
        )

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
        return self._of_model(scope, path) if path.endswith("Content") else None

    def _of_model(self, scope: Scope, path: str) -> ASGIApp | None:
        """Like `find`, for paths that name the model."""
        for end, patterns, label, endpoint in self._with_models:
            if path.endswith(end) and "\n" not in path:
                for pattern in patterns:
                    if (found := pattern.match(path)) is not None:
                        scope["path_params"] = found.groupdict()
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
