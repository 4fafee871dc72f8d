"""`/rl/webhooks`: the events that a receiver did not accept, and another attempt. URLs come from the settings only."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from proxy.api.audit_log import note
from proxy.api.bodies import Bodies
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given, check_known
from proxy.protocols.fields import expect_list, expect_str
from proxy.sessions.access import Access
from proxy.store.deliveries import Delivery
from proxy.store.outbox import Outbox
from tokengrove.errors import InvalidRequest, brief

_MOST = 1000
_USUAL = 100
_STATES = ("dead", "waiting")


class WebhookEndpoints:
    """Lists the deliveries that were not made yet, and sends dead letters again."""

    def __init__(self, access: Access, bodies: Bodies, outbox: Outbox) -> None:
        self._access, self._bodies, self._outbox = access, bodies, outbox

    async def index(self, request: Request) -> JsonResponse:
        """List the newest deliveries in a `state`: `dead` (default), which are not tried again, or `waiting`."""
        self._access.check_admin(key_of(request))
        check_known(request.query_params, ("state", "limit"))
        state, limit = request.query_params.get("state", "dead"), request.query_params.get("limit", str(_USUAL))
        if state not in _STATES:
            raise InvalidRequest(f"'state' must be one of {', '.join(_STATES)}, not {brief(state)}", param="state")
        if not (limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
            raise InvalidRequest(f"'limit' must be an integer between 1 and {_MOST}", param="limit")
        count, found = await self._outbox.listed(dead=state == "dead", most=int(limit))
        return JsonResponse({"total": count, "deliveries": [_shown(each) for each in found]})

    async def resend(self, request: Request) -> JsonResponse:
        """Send dead letters again: those of the events in `ids`, or all."""
        self._access.check_admin(key_of(request))
        body = await self._bodies.read_object(request)
        check_given(body, ("ids",))
        given = body.get("ids")
        ids = None if given is None else [expect_str(each, "ids") for each in expect_list(given, "ids")]
        if ids is not None and len(ids) > _MOST:
            raise InvalidRequest(f"'ids' has {len(ids)} entries; at most {_MOST} at once", param="ids")
        count = await self._outbox.resend(ids)
        note(request, resent=count)
        return JsonResponse({"resent": count})


def _shown(delivery: Delivery) -> dict[str, Any]:
    """A delivery as JSON. The body is what the receiver gets."""
    return delivery._asdict()
