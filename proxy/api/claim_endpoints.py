"""`POST /trajectories/claim` and `/acknowledge`: trainers share the ended sessions, each given at least once.

A claim waits at most `wait_s` for a first session and never for a full page. It takes nothing for a client that has
left; what a client claims and never hears of comes back with its next claim of the same `claim_id`, or when the lease
ends. With `renew` such a claim gives nothing new, even where all that it held was lost.
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

from proxy.api.export_endpoint import ExportEndpoint
from proxy.api.export_options import OPTION_FIELDS, refuse
from proxy.api.export_request import OF_SAMPLES, ParsedExport, check_known, parse_export
from proxy.api.http import JsonResponse, key_of, read_object
from proxy.api.long_polls import LongPolls
from proxy.errors import InvalidRequest, NotFound, ProxyError
from proxy.export_formats.create_encoder import encoder
from proxy.protocols.fields import (
    check_text,
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    optional_float,
    optional_int,
    optional_object,
    optional_text,
)
from proxy.sessions.access import Access
from proxy.settings import Settings
from proxy.store.bell import heard
from proxy.store.claim_queue import ClaimQueue
from proxy.store.leases import Acknowledgement, Lease, LeaseRequest
from proxy.store.recordings import Recordings
from proxy.store.session_query import SessionQuery
from proxy.types import SessionStatus

CLAIM_HEADER = "x-tokengrove-claim"

_MAX_LIMIT = 1000
_MAX_WAIT_S = 600.0
_LEASE_S = 600.0
_MAX_LEASE_S = 7 * 86_400.0
# How often a waiting claim looks for itself: leases that ran out, and ends on another server, ring no bell.
_WATCH_S = 0.5
# What goes into a header as it is.
_NAME = re.compile(r"[\w.:@-]{1,200}", re.ASCII)
_OF_THE_CLAIM = ("session_id", "session_ids", "filter", "wait_s", "limit", "cursor")
# What looks as if it chose the sessions of a claim, and does not.
_OF_AN_EXPORT = ("session_id", "session_ids", "cursor")
_FIELDS = ("limit", "lease_s", "filter", "wait_s", "claim_id", "consumer", "renew", "export")


@dataclass(frozen=True, slots=True)
class ParsedClaim:
    """A parsed body; without `export` the answer is the ids alone."""

    claim: LeaseRequest
    wait_s: float
    export: ParsedExport | None


class ClaimEndpoints:
    """The consuming endpoints."""

    def __init__(
        self,
        access: Access,
        queue: ClaimQueue,
        recordings: Recordings,
        export: ExportEndpoint,
        settings: Settings,
        polls: LongPolls,
    ) -> None:
        self._access, self._queue, self._recordings = access, queue, recordings
        self._export, self._settings, self._polls = export, settings, polls

    async def claim(self, request: Request) -> Response:
        """Lease ended sessions to a trainer: their ids, or their samples where the body has `export`."""
        self._access.check_admin(key_of(request))
        wanted = parse_claim(await read_object(request, self._settings.max_body_bytes))
        if wanted.export is not None:
            return await self._export_claimed(request, wanted, wanted.export)
        claimed = await self._claim(request, wanted)
        return _told(JsonResponse({"sessions": list(claimed.sessions), **_about(claimed)}), claimed)

    async def _export_claimed(self, request: Request, wanted: ParsedClaim, export: ParsedExport) -> Response:
        """The samples of what is claimed. What cannot be exported is given back at once."""
        encoding = encoder(export.format, export.options)  # refuses before anything is claimed
        claimed = await self._claim(request, wanted)
        try:
            records = await self._recordings.find_sessions(SessionQuery(session_ids=claimed.sessions))
            by_id = {record.session_id: record for record in records}
            page = [by_id[name] for name in claimed.sessions if name in by_id]  # pruning may come in between
            response = await self._export.respond(page, export, encoding, {"cursor": None, **_about(claimed)})
        except ProxyError:
            await self._queue.claim(replace(wanted.claim, limit=0, lease_s=0.0))
            raise
        return _told(response, claimed)

    async def acknowledge(self, request: Request) -> JsonResponse:
        """End leases for good. Twice is harmless; `lost` names what another claim holds by now."""
        self._access.check_admin(key_of(request))
        body = await read_object(request, self._settings.max_body_bytes)
        done = await self._queue.acknowledge(await self._acknowledgement(body))
        return JsonResponse({"acknowledged": list(done.sessions), "lost": dict(done.lost)})

    async def _claim(self, request: Request, wanted: ParsedClaim) -> Lease:
        """What can be claimed within `wait_s`, perhaps nothing."""
        until = time.monotonic() + wanted.wait_s
        while True:
            ring = self._queue.ends.listen()
            claimed = await self._queue.claim(wanted.claim)
            if claimed.sessions or claimed.again or not await self._comes(request, wanted, ring, until):
                return claimed

    async def _comes(self, request: Request, wanted: ParsedClaim, ring: asyncio.Event, until: float) -> bool:
        """Wait for something to claim. False when it is too late for that, the client has left or the server ends."""
        while (left := until - time.monotonic()) > 0 and not self._polls.ending:
            await self._polls.wait(heard(ring, min(left, _WATCH_S)))
            ring = self._queue.ends.listen()
            if await request.is_disconnected():
                return False
            if await self._queue.is_waiting(wanted.claim.wanted):
                return True
        return False

    async def _acknowledgement(self, body: Mapping[str, Any]) -> Acknowledgement:
        claim_id, names = optional_text(body, "claim_id"), body.get("session_ids")
        if names is not None:
            items = enumerate(expect_list(names, "session_ids"))
            texts = [check_text(expect_str(item, f"session_ids[{index}]"), "session_ids") for index, item in items]
            if len(texts) > _MAX_LIMIT:
                raise InvalidRequest(f"'session_ids' has more than {_MAX_LIMIT} ids", param="session_ids")
            return Acknowledgement(claim_id, tuple(dict.fromkeys(texts)))
        if claim_id is None:
            raise InvalidRequest("give 'claim_id', 'session_ids' or both", param="claim_id")
        held = await self._queue.sessions_of_claim(claim_id)
        if not held:
            raise NotFound(
                f"claim {claim_id!r} holds no session: there is none of this id, or its lease ran out and others "
                "claimed all that it had",
                param="claim_id",
            )
        return Acknowledgement(claim_id, tuple(held))


def _about(claimed: Lease) -> dict[str, Any]:
    held = bool(claimed.sessions)
    return {"claim_id": claimed.claim_id if held else None, "lease_until": claimed.lease_until if held else None}


def _told(response: Response, claimed: Lease) -> Response:
    """With the claim in a header, for answers that are not JSON."""
    if claimed.sessions:
        response.headers[CLAIM_HEADER] = claimed.claim_id
    return response


def parse_claim(body: Mapping[str, Any]) -> ParsedClaim:
    """The request in a body. Raises InvalidRequest naming the field."""
    refuse(body, _OF_AN_EXPORT, "is not for claims, which take what ended first; use 'filter'")
    refuse(body, OPTION_FIELDS, "says how to export: give it inside 'export'")
    check_known(body, _FIELDS)
    filters = optional_object(body, "filter")
    if filters.get("status") == SessionStatus.ACTIVE:
        raise InvalidRequest("'filter.status' active fits no session that can be claimed", param="filter.status")
    export = None if body.get("export") is None else _parse_export(expect_object(body["export"], "export"), filters)
    chosen = export or parse_export({"filter": filters})
    for name in OF_SAMPLES:
        if export is None and filters.get(name) is not None:
            raise InvalidRequest(
                f"'filter.{name}' chooses samples, not sessions: give 'export' too, or export them after",
                param=f"filter.{name}",
            )
    lease_s = optional_float(body, "lease_s", least=0.0, most=_MAX_LEASE_S)
    limit = optional_int(body, "limit", least=1, most=_MAX_LIMIT) or 1
    wait_s = optional_float(body, "wait_s", least=0.0, most=_MAX_WAIT_S) or 0.0
    renews = _renews(body)
    claim = LeaseRequest(
        claim_id=_claim_id(body),
        wanted=SessionQuery(**chosen.filters),
        limit=0 if renews else limit,
        lease_s=_LEASE_S if lease_s is None else lease_s,
    )
    return ParsedClaim(claim, 0.0 if renews else wait_s, export)


def _renews(body: Mapping[str, Any]) -> bool:
    """Whether only what a claim holds is asked for, and nothing new."""
    renew = body.get("renew")
    renews = renew is not None and expect_bool(renew, "renew")
    if renews and body.get("claim_id") is None:
        raise InvalidRequest("'renew' needs 'claim_id': whose lease to renew", param="claim_id")
    return renews


def _parse_export(export: Mapping[str, Any], filters: Mapping[str, Any]) -> ParsedExport:
    refuse(export, _OF_THE_CLAIM, "is the claim's to say; give it beside 'export'")
    return replace(parse_export({**export, "filter": filters}), ended_only=True)


def _claim_id(body: Mapping[str, Any]) -> str:
    """The caller's own id, so that it can ask again; else a new one that begins with the consumer's name."""
    for name in ("claim_id", "consumer"):
        text = optional_text(body, name)
        if text is not None and not _NAME.fullmatch(text):
            raise InvalidRequest(f"'{name}' must be 1 to 200 of A-Z a-z 0-9 _ . : @ -", param=name)
    return str(body.get("claim_id") or f"{body.get('consumer') or 'claim'}-{uuid.uuid4().hex}")
