"""`POST /export_trajectories`: what is stored, as samples. It changes nothing, and a page never splits a session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from proxy.api.http import JsonResponse, key_of, read_object
from proxy.errors import InvalidRequest, SessionNotFound, UnsupportedParameter
from proxy.protocols.base import (
    check_text,
    expect_list,
    expect_str,
    json_type,
    optional_float,
    optional_int,
    optional_object,
    optional_text,
)
from proxy.sessions import Sessions
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.export import ExportOptions, Layout, certificate, export_session
from proxy.types import Credit, Interaction, Outcome, SessionRecord, SessionStatus

_LAYOUT_NAMES = {
    "individual": Layout.INDIVIDUAL,
    "step": Layout.INDIVIDUAL,
    "concat": Layout.CONCAT,
    "traj": Layout.CONCAT,
}
_FORMATS = ("json",)
_FILTERS = ("group_id", "task_id", "status", "outcome", "since")
_MAX_LIMIT = 1000
_MAX_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A parsed body: which sessions, how, and which page of them."""

    session_ids: tuple[str, ...] | None
    filters: Mapping[str, Any]
    options: ExportOptions
    wait_s: float
    limit: int
    cursor: str | None


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
            interactions = await self._store.load_interactions(record.session_id)
            begun = len(await self._store.load_begun(record.session_id))
            # Joining arrays is work for a processor: done in a thread, live turns go on in between.
            samples += await asyncio.to_thread(_samples, record, interactions, wanted.options)
            entries[record.session_id] = certificate(record, interactions, begun)
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


def _samples(
    record: SessionRecord, interactions: Sequence[Interaction], options: ExportOptions
) -> list[dict[str, Any]]:
    return [sample.to_json() for sample in export_session(record, interactions, options)]


def parse_export(body: Mapping[str, Any]) -> ExportRequest:
    """The request in a body. Raises InvalidRequest naming the field and the choices."""
    _check_format(body)
    credit = body.get("credit")
    if credit not in (None, *Credit):
        raise InvalidRequest(f"'credit' must be one of {', '.join(Credit)}", param="credit")
    discount = optional_float(body, "discount", least=0.0, most=1.0)
    session_ids = _parse_session_ids(body)
    wait_s = optional_float(body, "wait_s", least=0.0, most=_MAX_WAIT_S) or 0.0
    if wait_s and session_ids is None:
        raise InvalidRequest("'wait_s' needs 'session_id' or 'session_ids': whom to wait for", param="wait_s")
    return ExportRequest(
        session_ids=session_ids,
        filters=_parse_filters(optional_object(body, "filter")),
        options=ExportOptions(_parse_layout(body), discount, Credit(credit) if credit else None),
        wait_s=wait_s,
        limit=optional_int(body, "limit", least=1, most=_MAX_LIMIT) or _MAX_LIMIT,
        cursor=optional_text(body, "cursor"),
    )


def _check_format(body: Mapping[str, Any]) -> None:
    if body.get("style") is not None and body.get("format") is None:
        raise UnsupportedParameter("'style' asks for format areal, which is not here yet; use 'layout'", param="style")
    if body.get("format") not in (None, *_FORMATS):
        raise InvalidRequest(f"'format' must be one of {', '.join(_FORMATS)}", param="format")
    for name in ("train", "include"):
        if body.get(name) not in (None, {}, []):
            raise UnsupportedParameter(f"'{name}' is not supported yet; leave it out", param=name)


def _parse_layout(body: Mapping[str, Any]) -> Layout:
    name = body.get("layout")
    if name is None:
        return Layout.INDIVIDUAL
    if not isinstance(name, str) or name not in _LAYOUT_NAMES:
        raise InvalidRequest(f"'layout' must be one of {', '.join(_LAYOUT_NAMES)}", param="layout")
    return _LAYOUT_NAMES[name]


def _parse_session_ids(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    one, many = optional_text(body, "session_id"), body.get("session_ids")
    if many is None:
        return None if one is None else (one,)
    if one is not None:
        raise InvalidRequest("give 'session_id' or 'session_ids', not both", param="session_ids")
    ids = expect_list(many, "session_ids")
    texts = (expect_str(item, f"session_ids[{index}]") for index, item in enumerate(ids))
    return tuple(check_text(text, "session_ids") for text in texts)


def _parse_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    for name in filters:
        if name not in _FILTERS:
            message = f"'filter.{name}' is not supported; filters are {', '.join(_FILTERS)}"
            raise UnsupportedParameter(message, param=f"filter.{name}")
    texts = {name: optional_text(filters, name, "filter.") for name in ("group_id", "task_id")}
    parsed: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    for name, choices in (("status", SessionStatus), ("outcome", Outcome)):
        if filters.get(name) is not None:
            if filters[name] not in list(choices):
                raise InvalidRequest(f"'filter.{name}' must be one of {', '.join(choices)}", param=f"filter.{name}")
            parsed[name] = choices(filters[name])
    if (since := filters.get("since")) is not None:
        if isinstance(since, bool) or not isinstance(since, int | float):
            raise InvalidRequest(f"'filter.since' must be Unix seconds, not {json_type(since)}", param="filter.since")
        parsed["since"] = float(since)
    return parsed
