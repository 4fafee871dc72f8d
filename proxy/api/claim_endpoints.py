"""`POST /trajectories/claim` and `/acknowledge`: trainers share the ended sessions; each is delivered at least once.

A claim waits at most `wait_s` for a first session, and never for a full page. It leases nothing for a client that has
left. If the answer is lost, a claim with the same `claim_id` returns the same sessions; otherwise they become available
when the lease ends. With `renew`, a claim extends the lease of its sessions and adds none.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.bodies import Bodies
from proxy.api.chosen_routes import ChosenRoutes
from proxy.api.export_endpoint import ExportEndpoint, check_encoder
from proxy.api.export_request import (
    SAMPLE_FILTERS,
    SAMPLE_OPTIONS,
    ParsedExport,
    parse_export,
    query_fields,
    refuse_filters,
)
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given, refuse
from proxy.api.long_polls import LongPolls
from proxy.api.option_body import made_of, read_given
from proxy.api.repeated_calls import RepeatableCall, name_of
from proxy.api.session_json import record_json
from proxy.protocols.fields import (
    check_text,
    expect_list,
    expect_object,
    expect_str,
    optional_text,
)
from proxy.sessions.access import Access
from proxy.store.bell import heard
from proxy.store.claim_queue import ClaimQueue
from proxy.store.leases import Acknowledgement, Lease, LeaseRequest, Queue
from proxy.store.recordings import Recordings
from proxy.store.session_query import SessionQuery
from proxy.types import SessionRecord
from tokengrove.errors import InvalidRequest, NotFound, ProxyError, brief
from tokengrove.options.claim import ClaimOptions
from tokengrove.options.option import options_of
from tokengrove.options.session import SessionStatus

CLAIM_HEADER = "x-tokengrove-claim"

_MAX_LIMIT = 1000
# Polling interval of a waiting claim: expired leases and ends on other servers do not notify this server.
_WATCH_S = 0.5
# Ids that can be sent unchanged in a header.
_NAME = re.compile(r"[\w.:@-]{1,200}", re.ASCII)
_CLAIM_ONLY = ("session_id", "session_ids", "filter", "wait_s", "limit", "cursor", "route")
# Fields of an export that would not select the sessions of a claim.
_EXPORT_ONLY = ("session_id", "session_ids", "cursor")
_FIELDS = options_of(ClaimOptions)


@dataclass(frozen=True, slots=True)
class ParsedClaim:
    """A parsed body. Without `export`, the answer has no samples. `route`: whose queue; None: the only one."""

    claim: LeaseRequest
    wait_s: float
    export: ParsedExport | None
    route: str | None


class ClaimEndpoints:
    """Claims ended sessions, and acknowledges them when they have been trained on."""

    def __init__(
        self,
        access: Access,
        queue: ClaimQueue,
        recordings: Recordings,
        export: ExportEndpoint,
        bodies: Bodies,
        polls: LongPolls,
        routes: ChosenRoutes,
    ) -> None:
        self._routes = routes
        self._access, self._queue, self._recordings = access, queue, recordings
        self._export, self._bodies, self._polls = export, bodies, polls

    async def claim(self, request: Request) -> Response:
        """Lease ended sessions to a trainer. The answer has their samples if the body has `export`."""
        self._access.check_trainer(key_of(request))
        body, name = await self._bodies.read_object(request), name_of(request)
        wanted = parse_claim(body, None if name is None else RepeatableCall(request, name, body).hash)
        queue = self._routes.queue(wanted.route)
        wanted = replace(wanted, claim=replace(wanted.claim, queue=queue))
        if wanted.export is not None:
            return await self._export_claimed(request, wanted, wanted.export)
        claimed = await self._claim(request, wanted)
        sessions = [record_json(record) for record in await self._records(claimed)]
        return _with_claim_header(JsonResponse({"sessions": sessions, **_lease_json(claimed)}), claimed)

    async def _export_claimed(self, request: Request, wanted: ParsedClaim, export: ParsedExport) -> Response:
        """Claim, then export the sessions. If they cannot be exported, release the lease at once."""
        export = await self._export.prepared(export)
        check_encoder(export)  # an unsupported format is refused before the claim
        claimed = await self._claim(request, wanted)
        try:
            counted = replace(export, ended_by=claimed.ended_by)
            page = await self._records(claimed)
            response = await self._export.respond(request, page, counted, {"cursor": None, **_lease_json(claimed)})
        except ProxyError:
            await self._queue.claim(replace(wanted.claim, limit=0, lease_s=0.0))
            raise
        return _with_claim_header(response, claimed)

    async def acknowledge(self, request: Request) -> JsonResponse:
        """Mark claimed sessions as consumed; idempotent. `lost` maps a session to the claim that holds it instead."""
        self._access.check_trainer(key_of(request))
        body = await self._bodies.read_object(request)
        done = await self._queue.acknowledge(await self._acknowledgement(body))
        return JsonResponse({"acknowledged": list(done.sessions), "lost": dict(done.lost)})

    async def _claim(self, request: Request, wanted: ParsedClaim) -> Lease:
        """Claim sessions, waiting up to `wait_s` for the first; the result may be empty."""
        until = time.monotonic() + wanted.wait_s
        while True:
            ring = self._queue.ends.listen()
            claimed = await self._queue.claim(wanted.claim)
            if claimed.sessions or claimed.again or not await self._wait_for_session(request, wanted, ring, until):
                return claimed

    async def _records(self, claimed: Lease) -> list[SessionRecord]:
        """The claimed sessions in their order, without sessions that were pruned in between."""
        records = await self._recordings.find_sessions(SessionQuery(session_ids=claimed.sessions))
        by_id = {record.session_id: record for record in records}
        return [by_id[name] for name in claimed.sessions if name in by_id]

    async def _wait_for_session(self, request: Request, wanted: ParsedClaim, ring: asyncio.Event, until: float) -> bool:
        """Wait until a session can be claimed. False after the deadline, a disconnect or the start of a shutdown."""
        while (left := until - time.monotonic()) > 0 and not self._polls.ending:
            await self._polls.wait(heard(ring, min(left, _WATCH_S)))
            ring = self._queue.ends.listen()
            if await request.is_disconnected():
                return False
            if await self._queue.is_waiting(wanted.claim):
                return True
        return False

    async def _acknowledgement(self, body: Mapping[str, Any]) -> Acknowledgement:
        check_given(body, ("claim_id", "session_ids", "route"))
        claim_id, names = optional_text(body, "claim_id"), body.get("session_ids")
        queue = await self._queue_of(claim_id, optional_text(body, "route"))
        if names is not None:
            items = enumerate(expect_list(names, "session_ids"))
            texts = [check_text(expect_str(item, f"session_ids[{index}]"), "session_ids") for index, item in items]
            if len(texts) > _MAX_LIMIT:
                raise InvalidRequest(f"'session_ids' has more than {_MAX_LIMIT} ids", param="session_ids")
            return Acknowledgement(claim_id, tuple(dict.fromkeys(texts)), queue)
        if claim_id is None:
            raise InvalidRequest("give 'claim_id', 'session_ids' or both", param="claim_id")
        held = await self._queue.sessions_of_claim(claim_id, queue)
        if not held:
            raise NotFound(
                f"claim {brief(claim_id)} holds no session: the id is unknown, or its lease expired "
                "and other claims took "
                "its sessions, or they were deleted or withdrawn; claim again",
                param="claim_id",
            )
        return Acknowledgement(claim_id, tuple(held), queue)

    async def _queue_of(self, claim_id: str | None, route: str | None) -> Queue:
        """The queue that a body names, else the only one in which its claim holds sessions."""
        if route is None and claim_id is not None:
            held = await self._queue.queues_of_claim(claim_id)
            if len(held) == 1:
                return self._routes.of_claim(held[0])
        return self._routes.queue(route)


def _lease_json(claimed: Lease) -> dict[str, Any]:
    held = bool(claimed.sessions)
    return {"claim_id": claimed.claim_id if held else None, "lease_until": claimed.lease_until if held else None}


def _with_claim_header(response: Response, claimed: Lease) -> Response:
    """Add the claim id as a header, for answers that are not JSON."""
    if claimed.sessions:
        response.headers[CLAIM_HEADER] = claimed.claim_id
    return response


def parse_claim(body: Mapping[str, Any], call_hash: str | None = None) -> ParsedClaim:
    """The claim in a body. `call_hash`: the hash of a repeatable call, which gives each repetition the same claim id.

    Raises InvalidRequest, which names the field.
    """
    refuse(
        body,
        _EXPORT_ONLY,
        "does not apply to a claim, which takes sessions in the order in which they ended; use 'filter'",
    )
    refuse(body, SAMPLE_OPTIONS, "is an export option: give it inside 'export'")
    refuse_filters(body)
    check_given(body, _FIELDS)
    given = made_of(ClaimOptions, read_given({**body, "export": None}, _FIELDS))
    if given.filter.status is SessionStatus.ACTIVE:
        raise InvalidRequest(
            "'filter.status' active matches no session: only ended ones can be claimed", param="filter.status"
        )
    export = None if body.get("export") is None else _parse_export(expect_object(body["export"], "export"), body)
    if export is None:
        why = "selects samples, not sessions: add 'export', or export the sessions afterwards"
        refuse(vars(given.filter), SAMPLE_FILTERS, why, "filter.")
    if given.renew and given.claim_id is None:
        raise InvalidRequest("'renew' needs 'claim_id', the claim to renew", param="claim_id")
    claim = LeaseRequest(
        claim_id=_claim_id(given, call_hash),
        wanted=SessionQuery(**query_fields(given.filter, named=False)),
        limit=0 if given.renew else given.limit,
        lease_s=given.lease_s,
        group_size=given.group_size,
    )
    return ParsedClaim(claim, 0.0 if given.renew else given.wait_s, export, given.route)


def _parse_export(export: Mapping[str, Any], claim: Mapping[str, Any]) -> ParsedExport:
    refuse(export, _CLAIM_ONLY, "belongs to the claim: give it beside 'export', not inside")
    refuse_filters(export)
    check_given(export, SAMPLE_OPTIONS, "export.")
    route = claim.get("route")
    return parse_export({**export, "filter": claim.get("filter"), "route": None if route is None else [route]})


def _claim_id(given: ClaimOptions, call_hash: str | None) -> str:
    """The client's own id, with which it can repeat the claim; else a new id that begins with the consumer's name."""
    for name, text in (("claim_id", given.claim_id), ("consumer", given.consumer)):
        if text is not None and not _NAME.fullmatch(text):
            raise InvalidRequest(f"'{name}' must be 1 to 200 characters of A-Z a-z 0-9 _ . : @ -", param=name)
    return given.claim_id or f"{given.consumer or 'claim'}-{call_hash or uuid.uuid4().hex}"
