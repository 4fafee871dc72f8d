"""`GET /rl/reasons`: the meaning of each reason word in answers, for pages and dashboards."""

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
    """Returns the meaning of words. It is the same for every session, so it is made once."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._reasons = reasons_json()

    async def index(self, request: Request) -> JsonResponse:
        """All words with their meanings."""
        self._access.check_reader(key_of(request))
        check_known(request.query_params, ())
        return JsonResponse(self._reasons)
