"""Recorded sessions, read for listings and exports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection

from proxy.side_columns.columns import DECLARED, Columns, SideShape, StoredColumn, is_known, loaded, shape_of
from proxy.side_columns.rows import SideColumn
from proxy.store.ended import Ended
from proxy.store.open_database import OpenDatabase
from proxy.store.session_query import SessionQuery
from proxy.store.sql import annotated, archived, outlines, reads, recent, session_routes, side_columns, texts, writes
from proxy.store.sql.archived import Archived
from proxy.store.writer import Phase
from proxy.types import GroupSummary, Interaction, ListedSession, Outline, SessionRecord
from tokengrove.options.model import RouteKind
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status

P = ParamSpec("P")
T = TypeVar("T")


class Readable(Protocol):
    """A database that can be read."""

    async def read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` on a connection that reads one snapshot."""


class SessionReads:
    """Reads of whole sessions."""

    def __init__(self, database: Readable) -> None:
        self._database = database

    async def _find(
        self,
        wanted: SessionQuery,
        read: Callable[Concatenate[Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if wanted.text is None:
            return await self._database.read(read, *args, **kwargs)
        return await self._database.read(texts.bounded, read, *args, **kwargs)

    async def find_sessions(self, wanted: SessionQuery) -> list[SessionRecord]:
        """Records in order of creation.

        Raises InvalidRequest for an unknown `after` (param cursor), for too many `session_ids`, and for a search for a
        text that takes longer than five seconds.
        """
        return await self._find(wanted, reads.find_sessions, wanted)

    async def find_listed(self, wanted: SessionQuery) -> list[ListedSession]:
        """Like `find_sessions`, with the values that determine the states of a session."""
        return await self._find(wanted, reads.find_listed, wanted)

    async def load_outlines(self, session_ids: Collection[str]) -> dict[str, Outline]:
        """The requests and answers of each of at most 10,000 sessions, without tokens."""
        return await self._database.read(outlines.load_outlines, session_ids)

    async def count_begun(self, session_ids: Collection[str]) -> dict[str, int]:
        """The number of calls that have begun and not ended, by session, of at most 10,000; zeros are omitted."""
        return await self._database.read(outlines.count_begun, session_ids)

    async def count_by_status(self, wanted: SessionQuery) -> dict[SessionStatus, int]:
        """The number of wanted sessions of each status. `metadata` and `metrics` are ignored."""
        return await self._find(wanted, outlines.count_by_status, wanted)

    async def find_groups(self, wanted: SessionQuery, before: int | None, limit: int) -> list[GroupSummary]:
        """At most `limit` groups of wanted sessions, newest first, starting after the group with number `before`.

        `metadata` and `metrics` are ignored.
        """
        return await self._find(wanted, outlines.find_groups, wanted, before, limit)

    async def last_ended(self, most: int) -> list[Ended]:
        """The sessions that ended last, newest first."""
        return await self._database.read(recent.last_ended, most)

    async def count_sessions(self, wanted: SessionQuery) -> int:
        """The number of sessions that match, on all pages. Raises InvalidRequest for too many `session_ids`."""
        return await self._find(wanted, reads.count_matching, wanted)

    async def find_archived(self, session_ids: Collection[str]) -> dict[str, Archived]:
        """Where the sessions among these, of at most 10,000, are that were moved to an archive."""
        return await self._database.read(archived.find_archived, session_ids)

    async def in_order(self, session_ids: Collection[str]) -> list[str]:
        """The existing sessions among at most 10,000 ids, archived or not, in order of creation."""
        return await self._database.read(archived.in_order, session_ids)

    async def load_interactions(
        self, session_id: str, after_seq: int = -1, statuses: Collection[Status] | None = None
    ) -> list[Interaction]:
        """Interactions with a seq above `after_seq`, by seq. `statuses`: only these; None: any status."""
        return await self._database.read(reads.load_interactions, session_id, after_seq, statuses)

    async def load_tokens(self, session_id: str) -> list[Interaction]:
        """All interactions by seq, messages only on roots: decoding messages takes most of the time."""
        return await self._database.read(reads.load_tokens, session_id)

    async def sessions_of(self, interaction_ids: Collection[str]) -> set[str]:
        """The sessions that contain some of these interactions, of a few hundred. Unknown ids are ignored."""
        return await self._database.read(reads.sessions_of, interaction_ids)

    async def load_columns(self, session_id: str, names: Collection[str]) -> dict[str, dict[str, SideColumn]]:
        """The side columns of these names of a session, by interaction id and name."""
        rows = await self._database.read(side_columns.load_columns, session_id, names)
        return await asyncio.to_thread(_decoded, rows)

    async def load_turn_columns(
        self, session_id: str, interaction_ids: Collection[str]
    ) -> dict[str, dict[str, SideColumn]]:
        """The side columns of some turns of a session, by interaction id and name."""
        rows = await self._database.read(side_columns.load_turn_columns, session_id, interaction_ids)
        return await asyncio.to_thread(_decoded, rows)

    async def column_sizes(self, session_id: str, interaction_id: str) -> dict[str, int]:
        """The number of rows of each stored side column of a turn, by name."""
        return await self._database.read(side_columns.column_sizes, session_id, interaction_id)

    async def column_kinds(self, session_ids: Collection[str]) -> list[SideShape]:
        """The kinds of rows of the recorded side columns of sessions, each once."""
        kinds = await self._database.read(side_columns.column_kinds, session_ids)
        return [shape_of(*kind) for kind in kinds if kind[0] in DECLARED]

    async def load_annotations(self, session_id: str) -> list[dict[str, Any]]:
        """The rows of `annotations` of a session."""
        return await self._database.read(annotated.parts_of_session, session_id)

    async def sum_annotations(self, session_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """`compared`, the sum `kl` and the largest `log_ratio` of each of these sessions that a trainer told about."""
        return await self._database.read(annotated.sums_of_sessions, session_ids)

    async def load_told(self, session_id: str, interaction_id: str | None = None) -> dict[str, dict[str, SideColumn]]:
        """The columns that trainers told of the turns of a session, or of one, by interaction id and name."""
        rows = await self._database.read(annotated.load_told, session_id, interaction_id)
        return await asyncio.to_thread(_decoded, rows)

    async def load_routes(self, session_ids: Collection[str] | None) -> Mapping[str, frozenset[RouteKind]]:
        """The named routes of these sessions, of at most 10,000, or of all; each with the kinds that it had."""
        return await self._database.read(session_routes.routes_of, session_ids)

    async def load_steps(self, session_ids: Collection[str], *, roots: bool) -> dict[str, list[Interaction]]:
        """Interactions without tokens and texts, by session and by seq, of at most 10,000 sessions.

        They have the fields from which scores are computed. With `roots`, roots also have the messages and tools from
        which purposes are derived.
        """
        return await self._database.read(reads.load_steps, session_ids, roots)

    async def find_incomplete(self, session_ids: Collection[str]) -> set[str]:
        """The sessions, of at most 10,000, with a call that failed, was aborted, or has begun and not ended."""
        return await self._database.read(reads.find_incomplete, session_ids)


def _decoded(rows: Iterable[tuple[str, StoredColumn]]) -> dict[str, dict[str, SideColumn]]:
    found: dict[str, dict[str, SideColumn]] = {}
    for interaction_id, column in rows:
        if not is_known(column.name):
            continue
        found.setdefault(interaction_id, {})[column.name] = loaded(column)
    return found


class Recordings(SessionReads):
    """Reads of whole sessions. Changes: the note that a session was exported, and scores of its turns."""

    def __init__(self, database: OpenDatabase) -> None:
        super().__init__(database)
        self._write = database.write

    def note_exported(self, session_ids: Sequence[str]) -> None:
        """Note, without waiting, that the sessions were exported whole. Ended sessions may then be pruned."""
        row = {"of_sessions": list(session_ids), "exported_at": time.time()}
        self._write.note(writes.set_exported, row, Phase.LAST)

    async def add_scores(self, session_id: str, columns: Mapping[str, Columns]) -> None:
        """Store scores of turns of a session, by interaction id. Columns that are stored already stay as they are."""
        rows = [row for each, found in columns.items() for row in side_columns.column_rows(session_id, each, found)]
        size = sum(len(row["data"]) for row in rows)
        await self._write.submit(writes.add_scores, rows, size=size)
