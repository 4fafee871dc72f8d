"""`/rl/rotate_keys`: replace the keys of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from proxy.api.addresses import Addresses
from proxy.api.audit_log import note
from proxy.api.bodies import Bodies
from proxy.api.http import JsonResponse, caller_of
from proxy.api.repeated_calls import RepeatableCall, RepeatedCalls, name_of
from proxy.api.session_json import started_json
from proxy.api.session_request import parse_rotation
from proxy.sessions.access import Access
from proxy.sessions.key_rotation import KeyRotation
from proxy.telemetry.http_request import request_of


class KeyEndpoints:
    """Rotates the keys of a session."""

    def __init__(
        self, access: Access, rotation: KeyRotation, bodies: Bodies, addresses: Addresses, repeated: RepeatedCalls
    ) -> None:
        self._access, self._rotation, self._bodies = access, rotation, bodies
        self._addresses, self._repeated = addresses, repeated

    async def rotate(self, request: Request) -> JsonResponse:
        """Replace the keys named in `keys` (default: all of them). The old keys stop working at once.

        A repeated call is looked up before its key is checked, because the first call may have replaced that key.
        """
        if name_of(request) is None:
            return await self._rotate(request, None, None)
        body = await self._bodies.read_object(request)
        return await self._repeated.once(request, body, lambda call: self._rotate(request, body, call))

    async def _rotate(
        self, request: Request, body: Mapping[str, Any] | None, call: RepeatableCall | None
    ) -> JsonResponse:
        session = await self._access.for_keys(caller_of(request))
        note(request, session=session.id)
        request_of(request.scope).enter(session.id, session.record.metadata)
        kinds, lifetime_s = parse_rotation(await self._bodies.read_object(request) if body is None else body)
        note(request, keys="all" if kinds is None else sorted(kinds))
        url = self._addresses.root_url(request)
        noted = None if call is None else lambda issued: call.answer(started_json(issued, url))
        async with session.lock:
            rotated = await self._rotation.rotate(session, kinds, lifetime_s, noted)
        return JsonResponse(started_json(rotated, url))
