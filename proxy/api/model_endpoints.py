"""`/v1/models`, in a form that both the OpenAI and the Anthropic SDK read, and in Google's form for its clients."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from proxy.api.answers import is_google_path
from proxy.api.headers import headers_of
from proxy.api.http import JsonResponse, caller_of
from proxy.api.neutral_errors import OUTSIDE
from proxy.models.declared import DeclaredModel
from proxy.sessions.access import Access
from proxy.turns.route import Routes, bindings_of

_GOOGLE = frozenset({b"x-goog-api-key", b"x-goog-api-client"})


class ModelEndpoints:
    """The declared models; without any, the served model, under any name, like in turns.

    At the listener for agents, the lists need the key of a session.
    """

    def __init__(self, access: Access, routes: Routes) -> None:
        self._access, self._routes = access, routes
        self._created = int(time.time())

    async def index(self, request: Request) -> JsonResponse:
        """List the models that the caller may name."""
        if _is_googles(request):
            return JsonResponse({"models": [_google_model(each) for each in await self._listed(request)]})
        models = await self._listed(request)
        listing = {
            "object": "list",
            "data": models,
            "has_more": False,
            "first_id": models[0]["id"] if models else None,
            "last_id": models[-1]["id"] if models else None,
        }
        return JsonResponse(listing)

    async def show(self, request: Request) -> JsonResponse:
        """Return the model that serves the requested name. Raises ModelNotFound."""
        model = await self._named(request)
        return JsonResponse(_google_model(model) if _is_googles(request) else model)

    async def _listed(self, request: Request) -> list[dict[str, Any]]:
        bindings = await self._bindings(request)
        if not self._routes.names.declared:
            return [self._model(self._routes.main.model)]
        return [self._model(each.name, each) for each in self._routes.names.listed(bindings)]

    async def _named(self, request: Request) -> dict[str, Any]:
        asked, bindings = request.path_params["model"], await self._bindings(request)
        if not self._routes.names.declared:
            return self._model(asked or self._routes.main.model)
        found = self._routes.names.find(asked, bindings)
        return self._model(asked or found.route, self._routes.names.declared[found.route])

    async def _bindings(self, request: Request) -> Mapping[str, str] | None:
        outside = OUTSIDE in request.scope
        if not (outside or self._routes.names.declared):
            return None
        session = await self._access.resolve_if_named(caller_of(request))
        return bindings_of(None if session is None else session.record)

    def _model(self, name: str, declared: DeclaredModel | None = None) -> dict[str, Any]:
        """A model in `/v1/models`. `display_name`: its own name, whatever name was asked for."""
        created_at = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        route = self._routes.main if declared is None else self._routes.engines.get(declared.name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokengrove",
            "type": "model",
            "display_name": self._routes.main.model if declared is None else declared.name,
            "created_at": created_at,
            "end_token_ids": [] if route is None else list(route.renderer.stop_token_ids),
            **({} if declared is None else {"kind": declared.kind.value}),
        }


def _is_googles(request: Request) -> bool:
    """Whether the client is one of Google's API, some of which use version `v1`, like the clients of other APIs."""
    return is_google_path(request.scope["path"]) or not _GOOGLE.isdisjoint(headers_of(request.scope))


def _google_model(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"models/{model['id']}",
        "displayName": model["display_name"],
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
