"""`/rl/rotate_keys`: replace the keys of a session."""

from __future__ import annotations

from starlette.requests import Request

from proxy.api.addresses import Addresses
from proxy.api.audit_log import note
from proxy.api.bodies import Bodies
from proxy.api.http import JsonResponse, caller_of
from proxy.api.session_json import started_json
from proxy.api.session_request import parse_rotation
from proxy.sessions.access import Access
from proxy.sessions.key_rotation import KeyRotation
from proxy.telemetry.http_request import request_of


class KeyEndpoints:
    """Rotate a session's keys."""

    def __init__(self, access: Access, rotation: KeyRotation, bodies: Bodies, addresses: Addresses) -> None:
        self._access, self._rotation, self._bodies = access, rotation, bodies
        self._addresses = addresses

    async def rotate(self, request: Request) -> JsonResponse:
        """Replace the keys named in `keys` (default: all of them). The old ones stop working at once."""
        session = await self._access.for_keys(caller_of(request))
        note(request, session=session.id)
        request_of(request.scope).enter(session.id, session.record.metadata)
        body = await self._bodies.read_object(request)
        kinds, lifetime_s = parse_rotation(body)
        note(request, keys=sorted(kinds))
        async with session.lock:
            rotated = await self._rotation.rotate(session, kinds, lifetime_s)
        return JsonResponse(started_json(rotated, self._addresses.root_url(request)))
