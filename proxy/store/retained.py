"""Ended sessions as rules of retention see them, and their deletion by these rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, select

from proxy.store.open_database import OpenDatabase
from proxy.store.sql.codec import decode_json
from proxy.store.sql.deletions import delete_rows
from proxy.store.sql.tables import sessions


class Aged(NamedTuple):
    """An ended session. `step`: the value in its metadata, of any type."""

    number: int
    session_id: str
    group_id: str | None
    ended_at: float
    step: Any


class _Due(NamedTuple):
    """Sessions to delete if they still meet a condition."""

    session_ids: Sequence[str]
    still: ColumnElement[bool]


class Retained:
    """Finds and deletes old sessions through an open store."""

    def __init__(self, opened: OpenDatabase) -> None:
        self._opened = opened

    async def find(self, condition: ColumnElement[bool], after: int, most: int) -> list[Aged]:
        """At most `most` sessions that meet a condition on `sessions`, by number, from that after `after` on."""
        return await self._opened.read(_find, condition, after, most)

    async def delete(self, names: Sequence[str], still: ColumnElement[bool]) -> list[str]:
        """Delete those of these sessions that meet the condition, in one transaction; return their ids."""
        gone: list[str] = await self._opened.write.submit(_delete, _Due(names, still))
        self._opened.metrics.removed.by[("deleted",)] += len(gone)
        for name in gone:
            self._opened.changed.note(name)
        return gone


def _find(connection: Connection, condition: ColumnElement[bool], after: int, most: int) -> list[Aged]:
    columns = [sessions.c[name] for name in ("number", "session_id", "group_id", "ended_at", "metadata")]
    query = select(*columns).where(condition, sessions.c.number > after).order_by(sessions.c.number).limit(most)
    return [
        Aged(number, name, group_id, ended_at, decode_json(metadata, {}).get("step"))
        for number, name, group_id, ended_at, metadata in connection.execute(query)
    ]


def _delete(connection: Connection, batch: Sequence[_Due]) -> Sequence[list[str]]:
    return [_delete_due(connection, due) for due in batch]


def _delete_due(connection: Connection, due: _Due) -> list[str]:
    query = select(sessions.c.session_id).where(sessions.c.session_id.in_(due.session_ids), due.still)
    names = list(connection.execute(query.order_by(sessions.c.session_id).with_for_update()).scalars())
    if names:
        delete_rows(connection, names)
    return names
