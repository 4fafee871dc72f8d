"""`/v1/models`, in a form that both the OpenAI and the Anthropic SDK read."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from proxy.api.http import JsonResponse


class ModelEndpoints:
    """The served model, under any name, like in turns. `end_token_ids` end its answers."""

    def __init__(self, name: str, end_token_ids: tuple[int, ...]) -> None:
        self._name, self._end_token_ids = name, end_token_ids
        self._created = int(time.time())

    async def index(self, request: Request) -> JsonResponse:
        """List the served model."""
        model = self._model(self._name)
        listing = {
            "object": "list",
            "data": [model],
            "has_more": False,
            "first_id": model["id"],
            "last_id": model["id"],
        }
        return JsonResponse(listing)

    async def show(self, request: Request) -> JsonResponse:
        """Return the served model under the requested name; `display_name` is its own name."""
        return JsonResponse(self._model(request.path_params["model"] or self._name))

    def _model(self, name: str) -> dict[str, Any]:
        created_at = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokengrove",
            "type": "model",
            "display_name": self._name,
            "created_at": created_at,
            "end_token_ids": list(self._end_token_ids),
        }
