"""`GET /rl/reasons`: what every word means that answers give as a reason, so that a page or a dashboard can say it."""

from __future__ import annotations

from starlette.requests import Request

from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_known
from proxy.sessions.access import Access
from tokengrove.reasons import BY_FIELD


def reasons_json() -> dict[str, dict[str, str]]:
    """By field, the meaning of each word."""
    return {field: {word.value: word.meaning for word in words} for field, (_, words) in BY_FIELD.items()}


class ReasonEndpoints:
    """Says what words mean. The same for every session, so it is made once."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._reasons = reasons_json()

    async def index(self, request: Request) -> JsonResponse:
        """All words with their meanings."""
        self._access.check_admin(key_of(request))
        check_known(request.query_params, ())
        return JsonResponse(self._reasons)
