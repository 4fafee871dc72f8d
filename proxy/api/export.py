"""`POST /export_trajectories`: what is stored, as samples. It changes nothing, and a page never splits a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import StreamingResponse

from proxy.access import Access
from proxy.api.export_request import ExportRequest, parse_export
from proxy.api.http import encode_json, key_of, read_object
from proxy.errors import SessionNotFound
from proxy.sessions import Sessions
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.export import ExportOptions, certificate, export_session, masked_tokens
from proxy.types import SessionRecord

CURSOR_HEADER = "x-tokengrove-cursor"
SESSIONS_HEADER = "x-tokengrove-sessions"
INCOMPLETE_HEADER = "x-tokengrove-incomplete"


class Export:
    """The export endpoint."""

    def __init__(self, access: Access, sessions: Sessions, store: Store, settings: Settings) -> None:
        self._access, self._sessions, self._store, self._settings = access, sessions, store, settings

    async def export(self, request: Request) -> StreamingResponse:
        """The page as one JSON object, written session by session: memory holds one of them."""
        self._access.check_admin(key_of(request))
        wanted = parse_export(await read_object(request, self._settings.max_body_bytes))
        if wanted.session_ids and wanted.wait_s:
            await self._sessions.wait_ended(wanted.session_ids, wanted.wait_s)
        records = await self._find(wanted)
        page = records[: wanted.limit]
        cursor = page[-1].session_id if len(records) > wanted.limit else None
        response = self.respond(page, cursor, wanted.options)
        response.headers.update(await self._about(page, cursor))
        return response

    async def _about(self, page: Sequence[SessionRecord], cursor: str | None) -> dict[str, str]:
        """What a client has to know of a page whatever its format: the next cursor, URL-quoted, and how many sessions
        it has, and how many of them lack a call."""
        incomplete = await self._store.find_incomplete([record.session_id for record in page])
        about = {SESSIONS_HEADER: str(len(page)), INCOMPLETE_HEADER: str(len(incomplete))}
        return about if cursor is None else {**about, CURSOR_HEADER: quote(cursor)}

    def respond(
        self,
        page: Sequence[SessionRecord],
        cursor: str | None,
        options: ExportOptions,
        also: Mapping[str, Any] | None = None,
    ) -> StreamingResponse:
        """The samples of these sessions as an answer; `also` are further fields of its object."""
        return StreamingResponse(self._page(page, cursor, options, also or {}), media_type="application/json")

    async def _page(
        self, page: Sequence[SessionRecord], cursor: str | None, options: ExportOptions, also: Mapping[str, Any]
    ) -> AsyncIterator[bytes]:
        entries: dict[str, Any] = {}
        between = b'{"samples":['
        for record in page:
            samples, entries[record.session_id] = await self._session(record, options)
            for sample in samples:
                yield between + sample
                between = b","
        opening = between if between != b"," else b""
        yield opening + b'],"sessions":' + encode_json(entries) + b"," + encode_json({"cursor": cursor, **also})[1:]
        if entries:
            self._store.note_exported(list(entries))

    async def _session(self, record: SessionRecord, options: ExportOptions) -> tuple[list[bytes], dict[str, Any]]:
        """The encoded samples of a session and its entry. In a thread, sample by sample: turns go on in between."""
        begun = await self._sessions.begun(record.session_id)
        interactions = await self._store.load_interactions(record.session_id)
        samples = await asyncio.to_thread(export_session, record, interactions, options)
        encoded = await asyncio.to_thread(lambda: [encode_json(sample.to_json()) for sample in samples])
        entry = {**certificate(record, interactions, begun), "masked_tokens": masked_tokens(samples)}
        return encoded, entry

    async def _find(self, wanted: ExportRequest) -> list[SessionRecord]:
        """One record more than the page holds, when there are more. Raises SessionNotFound for an unknown id."""
        records = await self._store.find_sessions(
            session_ids=wanted.session_ids, after=wanted.cursor, limit=wanted.limit + 1, **wanted.filters
        )
        if wanted.session_ids is not None and wanted.cursor is None and not wanted.filters:
            missing = set(wanted.session_ids) - {record.session_id for record in records}
            if missing and len(records) <= wanted.limit:
                raise SessionNotFound(f"there is no session {min(missing)!r}", param="session_id")
        return records
