"""`/rl/...` endpoints that start, end, list and show sessions, and grant capacity to start more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from proxy.api.addresses import Addresses
from proxy.api.http import JsonResponse, caller_of, key_of, read_object
from proxy.api.reward_endpoints import store_rewards
from proxy.api.session_json import interaction_json, record_json, started_json
from proxy.api.session_request import parse_ending, parse_start
from proxy.protocols.fields import optional_int
from proxy.sessions.access import Access
from proxy.sessions.sessions import Sessions
from proxy.settings import Settings
from proxy.trajectory.certificate import certificate
from proxy.trajectory.purpose import derive
from proxy.types import Status

_MAX_GRANT = 10**9


class SessionEndpoints:
    """Start, end, list and show sessions. The admin key starts and reads them; a control key may also end its own."""

    def __init__(self, access: Access, sessions: Sessions, settings: Settings, addresses: Addresses) -> None:
        self._access, self._sessions, self._settings = access, sessions, settings
        self._addresses = addresses

    async def grant_capacity(self, request: Request) -> JsonResponse:
        """Let `n` more sessions start (default: 1). AReaL's clients call this before each start."""
        self._access.check_admin(key_of(request))
        body = await self._body(request)
        number = optional_int(body, "n", least=1, most=_MAX_GRANT) or 1
        return JsonResponse({"capacity": await self._sessions.grant_capacity(number)})

    async def start(self, request: Request) -> JsonResponse:
        """Start a session, or find the one of the same `session_id`; the reply has its addresses and new keys."""
        self._access.check_admin(key_of(request))
        started = await self._sessions.start(parse_start(await self._body(request)))
        return JsonResponse(started_json(started, self._addresses.root_url(request)))

    async def end(self, request: Request) -> JsonResponse:
        """Store the rewards in the body, if any, then end the session."""
        session = await self._access.for_control(caller_of(request))
        body = await self._body(request)
        ending = parse_ending(body)
        async with session.lock:
            await store_rewards(self._sessions, session, body)
            count = await self._sessions.end(session, **ending)
        return JsonResponse({"interaction_count": count})

    async def index(self, request: Request) -> JsonResponse:
        """A page of sessions in order of id, after the id in the query parameter `after`."""
        self._access.check_admin(key_of(request))
        records = await self._sessions.page(request.query_params.get("after"))
        return JsonResponse({"sessions": [record_json(record) for record in records]})

    async def show(self, request: Request) -> JsonResponse:
        """One session with its tree of interactions. `turn` numbers the complete ones, from 0."""
        self._access.check_admin(key_of(request))
        session, interactions, begun = await self._sessions.look_at(request.path_params["session"])
        returns, purposes = self._sessions.returns(session), derive(interactions)
        complete = [interaction.id for interaction in interactions if interaction.status is Status.COMPLETE]
        turns = {interaction_id: turn for turn, interaction_id in enumerate(complete)}
        nodes = [
            {**interaction_json(node, returns.get(node.id), purposes.get(node.id)), "turn": turns.get(node.id)}
            for node in interactions
        ]
        counts = certificate(session.record, interactions, begun)
        shown = {name: counts[name] for name in ("reasons", "unaligned", "failed", "aborted", "superseded")}
        return JsonResponse({**record_json(session.record), **shown, "begun_not_ended": begun, "interactions": nodes})

    async def _body(self, request: Request) -> Mapping[str, Any]:
        return await read_object(request, self._settings.max_body_bytes)
