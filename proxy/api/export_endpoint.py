"""`POST /trajectories/export`: stored sessions as samples. It changes nothing, and a page never splits a session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import StreamingResponse

from proxy.api.bodies import Bodies
from proxy.api.chosen_routes import ChosenRoutes
from proxy.api.connections import while_connected
from proxy.api.export_columns import ExportColumns
from proxy.api.export_images import ExportImages
from proxy.api.export_request import ParsedExport, parse_export
from proxy.api.headers import headers_of
from proxy.api.http import key_of
from proxy.api.long_polls import LongPolls
from proxy.api.pace import Pace
from proxy.api.teacher_columns import Scoring, Teachers
from proxy.export_formats.create_encoder import encoder
from proxy.export_formats.encoder import Encoder
from proxy.export_formats.image_table import ImageEntry, Pieces, WantedImage
from proxy.resources.senders import Sender
from proxy.sessions.access import Access
from proxy.sessions.end_waiter import EndWaiter
from proxy.sessions.keys import read_only
from proxy.sessions.registry import Registry
from proxy.side_columns.columns import Columns
from proxy.store.archive.scratch import Scratch
from proxy.store.archive.served import ServedArchive
from proxy.store.recordings import Recordings, SessionReads
from proxy.store.session_query import SessionQuery
from proxy.telemetry.groups import ExportMetrics
from proxy.telemetry.http_request import request_of
from proxy.trajectory.advantages import Group, Groups, group_of
from proxy.trajectory.forest import Packer
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.routes import by_route
from proxy.trajectory.sample_maker import Decode
from proxy.trajectory.sample_row import SampleRow
from proxy.trajectory.scored_session import scored_session
from proxy.trajectory.session_samples import SessionSamples
from proxy.trajectory.summary import certificate
from proxy.types import Interaction, SessionRecord
from tokengrove.errors import InvalidRequest, ScratchFull, SessionNotFound, brief
from tokengrove.options.export import Include, TooLong
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import LeftOut

logger = logging.getLogger(__name__)

CURSOR_HEADER = "x-tokengrove-cursor"
"""The cursor of the next page, percent-encoded. In any format, it is known before the first byte."""
SESSIONS_HEADER = "x-tokengrove-sessions"
INCOMPLETE_HEADER = "x-tokengrove-incomplete"
"""The number of sessions of the page, and of sessions with missing calls. In any format, it needs no decoding."""
LEFT_OUT_HEADER = "x-tokengrove-left-out"
"""The number of matching sessions that were left out, on the first page; absent if there are none."""

_NO_SCORES: Mapping[str, Columns] = MappingProxyType({})
# Sessions whose rewards are read at once for group statistics: about 100 bytes per turn.
_GROUP_PAGE = 1000


class ExportEndpoint:
    """The export endpoint. `decoder` returns what turns the token ids of a route into text."""

    def __init__(
        self,
        access: Access,
        registry: Registry,
        waiter: EndWaiter,
        recordings: Recordings,
        bodies: Bodies,
        polls: LongPolls,
        pace: Pace,
        metrics: ExportMetrics,
        images: ExportImages,
        routes: ChosenRoutes,
        teachers: Teachers,
        archive: ServedArchive,
        decoder: Callable[[str], Decode | None] = lambda _: None,
    ) -> None:
        self._access, self._registry, self._waiter, self._bodies = access, registry, waiter, bodies
        self._recordings: SessionReads = recordings
        self._images, self._columns = images, ExportColumns(recordings)
        self._routes, self._teachers, self._archive = routes, teachers, archive
        self._count_begun: Callable[[str], Awaitable[int]] = lambda name: registry.count_begun(name)
        self._note_exported = recordings.note_exported
        self._polls, self._pace, self._metrics, self._decoder = polls, pace, metrics, decoder

    async def export(self, request: Request) -> StreamingResponse:
        """Stream a page session by session, with one session in memory."""
        reader = self._access.check_reader(key_of(request))
        wanted = await self.prepared(parse_export(await self._bodies.read_object(request)))
        check_encoder(wanted)
        if reader:
            if wanted.options.teachers:
                raise read_only()  # their scores are computed by engines, and stored
            wanted = replace(wanted, delivers=False)
        ids = wanted.page.session_ids
        moved = await self._recordings.find_archived(ids) if ids else {}
        if ids and wanted.page.wait_s:
            stored = [each for each in ids if each not in moved]
            await self._polls.wait(self._waiter.wait_ended(stored, wanted.page.wait_s))
        if moved:
            return await self._export_archived(request, wanted)
        return await self._export(request, wanted)

    async def _export(self, request: Request, wanted: ParsedExport) -> StreamingResponse:
        records = await self._find(wanted)
        if wanted.page.session_ids is not None and len(wanted.page.session_ids) == 1 and records:
            request_of(request.scope).enter(records[0].session_id, records[0].metadata)
        left_out = await self._left_out(wanted)
        cursor = records[wanted.page.limit - 1].session_id if len(records) > wanted.page.limit else None
        return await self.respond(request, records[: wanted.page.limit], wanted, {"cursor": cursor, **left_out})

    async def _export_archived(self, request: Request, wanted: ParsedExport) -> StreamingResponse:
        """Export from a copy of the sessions that the body names, of which some are archived."""
        scratch = await self._archive.scratch(await self._copied(wanted))
        try:
            response = await self._over(scratch)._export(request, wanted)
        except BaseException:
            await asyncio.to_thread(scratch.close)
            raise
        response.body_iterator = _closing(response.body_iterator, scratch)
        return response

    async def _copied(self, wanted: ParsedExport) -> Sequence[str]:
        """The sessions that a page needs: those after its cursor, or all if they are filtered or compared."""
        assert wanted.page.session_ids is not None
        found = await self._recordings.in_order(wanted.page.session_ids)
        cursor = wanted.page.cursor
        if wanted.filters or wanted.options.compares or (cursor is not None and cursor not in found):
            return found
        begin = 0 if cursor is None else found.index(cursor)  # the cursor must exist
        return found[begin : begin + wanted.page.limit + 2]

    def _over(self, scratch: Scratch) -> ExportEndpoint:
        """This endpoint, reading a copy of some sessions."""

        async def count_begun(session_id: str) -> int:
            return (await scratch.recordings.count_begun([session_id])).get(session_id, 0)

        over = copy(self)
        over._recordings, over._columns = scratch.recordings, ExportColumns(scratch.recordings)
        over._images, over._routes = self._images.over(scratch.images), self._routes.over(scratch.recordings)
        over._teachers = self._teachers.over(scratch.recordings, scratch.images)
        over._count_begun = count_begun
        return over

    async def prepared(self, wanted: ParsedExport) -> ParsedExport:
        """The export with options that this server can fulfil. Raises UnsupportedParameter."""
        return replace(wanted, options=await self._images.prepared(wanted.options, wanted.format))

    async def respond(
        self,
        request: Request,
        page: Sequence[SessionRecord],
        wanted: ParsedExport,
        end: Mapping[str, Any],
    ) -> StreamingResponse:
        """Stream the samples of these sessions, then the fields `end`.

        The response starts with its first bytes, so a format that is first written to disk fails before it if the disk
        is full. Raises InvalidRequest if a sample is longer than the padded lengths and `on_too_long` is refuse, and
        for a route that it cannot have, ScratchFull, and ClientDisconnect.
        """
        names = [record.session_id for record in page]
        wanted = replace(wanted, options=await self._routes.of_export(wanted.options, names))
        wanted = replace(wanted, options=await self._columns.chosen(wanted, page))
        groups = await self._groups(page, wanted)
        await self._check_fits(page, wanted.options, groups)
        headers = await self._headers(page, end)
        encoding = encoder(wanted.format, wanted.options)
        sender = self._bodies.addresses.sender(request.scope, headers_of(request.scope))
        body = self._page(page, end, encoding, wanted, groups, sender)
        first = await while_connected(request.receive, anext(body, b""))
        return StreamingResponse(_behind(first, body), media_type=encoding.media_type, headers=headers)

    async def _left_out(self, wanted: ParsedExport) -> dict[str, Any]:
        """The number of sessions that the filter's defaults leave out, by reason, on the first page."""
        if wanted.page.cursor is not None:
            return {}
        filters, left_out = dict(wanted.filters), dict[str, int]()
        if filters.get("validation") is False:
            left_out[LeftOut.VALIDATION.value] = await self._number({**filters, "validation": True}, wanted)
            del filters["validation"]  # each session has one reason: withdrawn ones are always left out
        if filters.get("withdrawn") is False:
            left_out[LeftOut.WITHDRAWN.value] = await self._number({**filters, "withdrawn": True}, wanted)
        found = {reason: number for reason, number in left_out.items() if number}
        return {"left_out": found} if found else {}

    async def _number(self, filters: Mapping[str, Any], wanted: ParsedExport) -> int:
        return await self._recordings.count_sessions(SessionQuery(session_ids=wanted.page.session_ids, **filters))

    async def _headers(self, page: Sequence[SessionRecord], end: Mapping[str, Any]) -> dict[str, str]:
        """The headers that describe a page in any format."""
        incomplete = await self._recordings.find_incomplete([record.session_id for record in page])
        about = {SESSIONS_HEADER: str(len(page)), INCOMPLETE_HEADER: str(len(incomplete))}
        if "left_out" in end:
            about[LEFT_OUT_HEADER] = str(sum(end["left_out"].values()))
            about |= {f"{LEFT_OUT_HEADER}-{reason}": str(number) for reason, number in end["left_out"].items()}
        cursor = end["cursor"]
        return about if cursor is None else {**about, CURSOR_HEADER: quote(cursor)}

    async def _page(
        self,
        page: Sequence[SessionRecord],
        end: Mapping[str, Any],
        encoding: Encoder,
        wanted: ParsedExport,
        groups: Groups,
        sender: Sender,
    ) -> AsyncGenerator[bytes]:
        """Encode the page piece by piece in threads, with turns running in between."""
        options, begun, samples = wanted.options, time.perf_counter(), 0
        scoring = self._teachers.begin(options.teachers, sender)
        packer = None if options.forest is None else Packer(options)
        try:
            async with aclosing(self._laid_out(page, options, groups, scoring, packer)) as laid_out:
                async for rows, entry in laid_out:
                    samples += len(rows)
                    async for piece in self._pieces(encoding.add(rows, entry), options):
                        yield piece
            told = {} if packer is None else {"forest": packer.counts()}
            async for piece in self._pieces(encoding.finish({**told, **end}), options):
                yield piece
        finally:
            scoring.end()
            encoding.close()
        self._metrics.duration.observe(time.perf_counter() - begun, wanted.format)
        self._metrics.sessions.by[()] += len(page)
        self._metrics.samples.by[()] += samples
        # A session that was active when it was read may have ended since, with turns that this export lacks.
        ended = [record.session_id for record in page if record.status is not SessionStatus.ACTIVE]
        if ended and wanted.delivers:
            self._note_exported(ended)

    async def _laid_out(
        self,
        page: Sequence[SessionRecord],
        options: LayoutOptions,
        groups: Groups,
        scoring: Scoring,
        packer: Packer | None,
    ) -> AsyncGenerator[tuple[Sequence[SampleRow], dict[str, Any]]]:
        """Samples, and the entry of each session. With a `packer`, sequences come with the last of their sessions."""
        last: dict[str, Any] | None = None
        for record in page if packer is None else _by_group(page):
            taught = await scoring.columns(record, options)
            session_samples, entry = await self._pace.work(self._session(record, options, groups, taught))
            entry |= scoring.told(record)
            if session_samples.dropped and _refuses(options):
                raise _too_long(record, session_samples, options)  # it grew since the check: abort the stream
            if packer is None:
                yield session_samples.rows, entry
                continue
            made = await self._pace.work(asyncio.to_thread(packer.add, record, session_samples.paths))
            if last is not None:
                yield made, last
            last = entry
        if packer is not None and last is not None:
            yield await self._pace.work(asyncio.to_thread(packer.finish)), last

    async def _pieces(self, pieces: Pieces, options: LayoutOptions) -> AsyncIterator[bytes]:
        """The bytes that an encoder makes. The images that it wants are read and sent to it."""
        entry: ImageEntry | None = None
        while (piece := await self._pace.work(_next(pieces, entry))) is not None:
            entry = None
            if isinstance(piece, WantedImage):
                entry = await self._pace.work(self._images.read(piece, options))
            elif piece:
                yield piece

    async def _session(
        self, record: SessionRecord, options: LayoutOptions, groups: Groups, taught: Mapping[str, Columns] = _NO_SCORES
    ) -> tuple[SessionSamples, dict[str, Any]]:
        """Load and lay out a session; return its samples and its entry. `taught`: its teacher columns."""
        begun = await self._count_begun(record.session_id)
        whole = Include.MESSAGES in options.include
        load = self._recordings.load_interactions if whole else self._recordings.load_tokens
        interactions = await load(record.session_id)
        positions, columns = self._images.positions(options), await self._columns.of(record.session_id, options)
        if taught:
            columns = {each: {**columns.get(each, {}), **taught.get(each, {})} for each in {*columns, *taught}}
        session_samples = await asyncio.to_thread(
            lay_out, record, interactions, options, groups, self._decoder, positions, columns
        )
        return session_samples, {
            **certificate(record, interactions, begun),
            **session_samples.entry,
            **session_samples.counts(options),
        }

    async def _groups(self, page: Sequence[SessionRecord], wanted: ParsedExport) -> Groups:
        """The statistics of the page's groups, over all matching sessions. Reads rewards, not tokens."""
        groups, options, after = Groups(), wanted.options, None
        if not options.compares:
            return groups
        alone = [record for record in page if record.group_id is None]
        await self._count(groups, alone, options)
        names = {record.group_id for record in page if record.group_id is not None}
        while names:
            query = SessionQuery(session_ids=wanted.page.session_ids, after=after, limit=_GROUP_PAGE, **wanted.filters)
            query = replace(query, group_ids=names, ended_by=wanted.ended_by)
            records = await self._recordings.find_sessions(query)
            await self._count(groups, records, options)
            if len(records) < _GROUP_PAGE:
                break
            after = records[-1].session_id
        return groups

    async def _count(self, groups: Groups, records: Sequence[SessionRecord], options: LayoutOptions) -> None:
        """Add these sessions to their groups."""
        names = [record.session_id for record in records]
        steps = await self._recordings.load_steps(names, roots=options.reads_purposes)
        await self._pace.work(asyncio.to_thread(_add, groups, records, steps, options))

    async def _check_fits(self, page: Sequence[SessionRecord], options: LayoutOptions, groups: Groups) -> None:
        """Check that all samples fit, before the first byte: after it, the request cannot be refused."""
        if not _refuses(options):
            return
        for record in page:
            session_samples, _ = await self._pace.work(self._session(record, replace(options, columns=()), groups))
            if session_samples.dropped:
                raise _too_long(record, session_samples, options)

    async def _find(self, wanted: ParsedExport) -> list[SessionRecord]:
        """The sessions of the page, plus one if there is a next page. Raises SessionNotFound for an unknown id."""
        records = await self._recordings.find_sessions(
            SessionQuery(
                session_ids=wanted.page.session_ids,
                after=wanted.page.cursor,
                limit=wanted.page.limit + 1,
                **wanted.filters,
            )
        )
        if wanted.page.session_ids is not None and wanted.page.cursor is None and not wanted.filters:
            missing = set(wanted.page.session_ids) - {record.session_id for record in records}
            if missing and len(records) <= wanted.page.limit:
                raise SessionNotFound(f"there is no session {brief(min(missing))}", param="session_id")
        return records


def check_encoder(wanted: ParsedExport) -> None:
    """Raise UnsupportedParameter if the library of the format is not installed."""
    encoder(wanted.format, wanted.options).close()


def _by_group(page: Sequence[SessionRecord]) -> list[SessionRecord]:
    """The sessions of each group one after the other, in the order of their first."""
    found: dict[Group, list[SessionRecord]] = {}
    for record in page:
        found.setdefault(group_of(record.session_id, record.group_id), []).append(record)
    return [record for members in found.values() for record in members]


def _refuses(options: LayoutOptions) -> bool:
    """Whether the export is refused if a sample does not fit."""
    if options.padding is not None:
        return options.padding.on_too_long is TooLong.REFUSE
    bounded = options.forest is not None and options.forest.max_tokens is not None
    return bounded and not options.drops_long


def _add(
    groups: Groups,
    records: Sequence[SessionRecord],
    steps: Mapping[str, Sequence[Interaction]],
    options: LayoutOptions,
) -> None:
    for record in records:
        for route, turns in by_route(steps[record.session_id]).items():
            scored = scored_session(record, turns, options)
            group, scores = group_of(record.session_id, record.group_id, route), scored.values()
            groups.add(group, scores, scored.steps(), scored.rewards())
            if scores:
                groups.note_scope(group, scored.scores.scope, record.session_id)


async def _closing(body: AsyncIterable[Any], scratch: Scratch) -> AsyncIterator[Any]:
    """The pieces of a body. Its end closes what it was read from."""
    try:
        async for piece in body:
            yield piece
    finally:
        await asyncio.to_thread(scratch.close)


async def _behind(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """The first piece of a body, then the rest. Closing this iterator closes `rest`."""
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


def _send(pieces: Pieces, entry: ImageEntry | None) -> bytes | WantedImage | None:
    try:
        return pieces.send(entry)
    except StopIteration:
        return None


async def _next(pieces: Pieces, entry: ImageEntry | None) -> bytes | WantedImage | None:
    """Make the next piece in a thread; None after the last.

    Waits for the thread even if cancelled repeatedly, because the encoder is closed next.
    """
    making = asyncio.ensure_future(asyncio.to_thread(_send, pieces, entry))
    try:
        return await asyncio.shield(making)
    except OSError as error:
        logger.error("an export cannot be written to a temporary file: %s", error)
        raise ScratchFull(
            "the server cannot write the temporary files of this export (is their disk full?): free space there, or "
            "ask for format json or jsonl, which need none"
        ) from None
    except asyncio.CancelledError:
        while not making.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([making])
        raise


def _too_long(record: SessionRecord, session_samples: SessionSamples, options: LayoutOptions) -> InvalidRequest:
    if options.forest is not None:
        return InvalidRequest(
            f"session {brief(record.session_id)} has samples of more than 'max_tokens' tokens: "
            f"{session_samples.dropped}; raise it, or set 'on_too_long' to drop",
            param="max_tokens",
        )
    return InvalidRequest(
        f"{session_samples.dropped} samples of session {brief(record.session_id)} do not fit 'prompt_length' and "
        "'response_length'; "
        "raise the lengths, or set 'on_too_long' to drop or truncate",
        param="on_too_long",
    )
