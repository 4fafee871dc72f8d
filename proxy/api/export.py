"""`POST /export_trajectories`: what is stored, as samples. It changes nothing, and a page never splits a session."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from proxy.api.export_request import ExportRequest, parse_export
from proxy.api.http import JsonResponse, key_of, read_object
from proxy.errors import SessionNotFound
from proxy.sessions import Sessions
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.export import certificate, export_session
from proxy.types import SessionRecord


class Export:
    """The export endpoint."""

    def __init__(self, sessions: Sessions, store: Store, settings: Settings) -> None:
        self._sessions, self._store, self._settings = sessions, store, settings

    async def export(self, request: Request) -> JsonResponse:
        self._sessions.check_admin(key_of(request))
        wanted = parse_export(await read_object(request, self._settings.max_body_bytes))
        if wanted.session_ids and wanted.wait_s:
            await self._sessions.wait_ended(wanted.session_ids, wanted.wait_s)
        records = await self._find(wanted)
        page, cursor = records[: wanted.limit], None
        if len(records) > wanted.limit:
            cursor = page[-1].session_id
        samples: list[dict[str, Any]] = []
        entries: dict[str, Any] = {}
        for record in page:
            begun = await self._sessions.begun(record.session_id)
            interactions = await self._store.load_interactions(record.session_id)
            # Joining arrays is work for a processor: done in a thread, live turns go on in between.
            made = await asyncio.to_thread(export_session, record, interactions, wanted.options)
            samples += [sample.to_json() for sample in made]
            masked = sum(sample.masked_tokens for sample in made)
            entries[record.session_id] = {**certificate(record, interactions, begun), "masked_tokens": masked}
        body = {"samples": samples, "sessions": entries, "cursor": cursor}
        return await asyncio.to_thread(JsonResponse, body)

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
