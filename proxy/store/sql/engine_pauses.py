"""Statements for the notes about paused engine servers. There is one row for each, only during a pause."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, delete, insert, select

from proxy.store.sql.tables import engine_pauses
from proxy.types import PauseNote

Batch = Sequence[Collection[PauseNote]]


def note(connection: Connection, batch: Batch) -> Sequence[None]:
    """Write notes, and replace notes with the same server and owner."""
    for each in (one for notes in batch for one in notes):
        where = engine_pauses.c.url == each.url, engine_pauses.c.owner == each.owner
        connection.execute(delete(engine_pauses).where(*where))
        connection.execute(insert(engine_pauses).values(each._asdict()))
    return [None] * len(batch)


def forget(connection: Connection, batch: Batch) -> Sequence[None]:
    """Delete notes that were not renewed since."""
    for each in (one for notes in batch for one in notes):
        where = engine_pauses.c.url == each.url, engine_pauses.c.owner == each.owner
        connection.execute(delete(engine_pauses).where(*where, engine_pauses.c.until <= each.until))
    return [None] * len(batch)


def noted(connection: Connection) -> list[PauseNote]:
    """All notes."""
    return [PauseNote(*row) for row in connection.execute(select(*engine_pauses.c))]
