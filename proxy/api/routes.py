"""Routes whose requests are counted and logged by template, never by path, which contains sessions and secrets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette import routing
from starlette.routing import Match
from starlette.types import Scope

from proxy.telemetry.http_request import set_route


class Route(routing.Route):
    """A route of Starlette. `label`: the name for counting its requests; by default its template."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, methods: list[str], label: str | None = None
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.label = label or path.replace(":path}", "}")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As in Starlette; also sets the label of requests whose path matches, with any method."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            set_route(found, self.label)
        return match, found
