"""A database with many turns for `tests.bench.grown`: one group of sessions, written by the store and then copied.

Copies have new ids and checksums, so `db check` finds nothing wrong with them. They are inserted as rows, in the order
of creation and of ends."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Table, select, type_coerce
from sqlalchemy.types import NullType

from proxy.store import database
from proxy.store.sql import checksums
from proxy.store.sql.tables import interactions, returns, sessions
from proxy.store.store import Store
from proxy.types import Message, Role, SessionRecord
from tests.bench.load import Words
from tests.interactions import interaction
from tokengrove.options.session import Outcome, SessionStatus

GROUP, TURNS = 8, 10
NEW_TOKENS, SAMPLED_TOKENS, CHARACTERS = 60, 40, 200
WAITING_GROUPS = 200
"""The last groups are neither exported nor acknowledged, so they wait to be claimed."""

MINUTE_S = 60.0
"""Between the starts of two groups, and between the start and the end of a session."""

OPEN_EACH = 50
"""Every so many groups, the sessions of a group are still open."""

_ROWS = 20_000
Row = dict[str, Any]


async def write_group(url: str) -> None:
    """Write the group that is copied: sessions of a few turns, rewarded and ended."""
    store = Store.open(url, migrate=True)
    words, chance = Words(0), random.Random(0)
    try:
        for number in range(GROUP):
            name = f"g-{number}"
            await store.starts.create_session(
                SessionRecord(name, task_id="task", group_id="g", group_size=GROUP, created_at=time.time())
            )
            parent, length = None, 0
            for turn in range(TURNS):
                ids = array("i", [chance.randrange(150_000) for _ in range(NEW_TOKENS + SAMPLED_TOKENS)])
                made = interaction(
                    f"{name}-{turn}", parent=parent, suffix=ids[:NEW_TOKENS], output=ids[NEW_TOKENS:], prefix=length
                )
                texts = Message(Role.USER, words.text(CHARACTERS)), Message(Role.ASSISTANT, words.text(CHARACTERS))
                made = replace(made, session_id=name, new_messages=texts[:1], output=texts[1], completed_at=time.time())
                store.turns.note_begun(made.id, name, made.request_hash)
                await store.turns.append(made, None)
                store.turns.note_replied(made.id)
                parent, length = made.id, length + len(ids)
    finally:
        await store.close()


def grow(url: str, turns: int) -> None:
    """Write a database of at least `turns` turns. `url`: of a database that does not exist, or is empty."""
    asyncio.run(write_group(url))
    engine = database.writer_engine(database.parse_url(url))
    with engine.connect() as connection:
        copied = {table: _rows(connection, table) for table in (sessions, interactions)}
        connection.rollback()
        for table, made in _copies(copied, -(-turns // (GROUP * TURNS))).items():
            while rows := list(islice(made, _ROWS)):
                _insert(connection, table, rows)
        if connection.dialect.name == "postgresql":  # the copies have numbers of their own
            newest = "SELECT setval(pg_get_serial_sequence('sessions', 'number'), max(number)) FROM sessions"
            connection.exec_driver_sql(newest)
        connection.commit()
        connection.exec_driver_sql("ANALYZE")
        connection.commit()
    engine.dispose()


def _rows(connection: Connection, table: Table) -> list[Row]:
    """The rows as the driver returns them."""
    columns = [type_coerce(column, NullType()).label(column.name) for column in table.c]
    return [dict(row) for row in connection.execute(select(*columns).order_by(columns[0])).mappings()]


def _ended(row: Row) -> Row:
    ended = {
        "status": str(SessionStatus.ENDED),
        "outcome": str(Outcome.FINISHED),
        "ended_at": row["created_at"] + MINUTE_S,
    }
    return {**ended, "end_checksum": checksums.of_end({**row, **ended})}


def _copies(copied: Mapping[Table, list[Row]], groups: int) -> dict[Table, Iterator[Row]]:
    return {
        sessions: (_session(row, group, groups) for group in range(1, groups) for row in copied[sessions]),
        interactions: (_turn(row, group) for group in range(1, groups) for row in copied[interactions]),
        returns: (
            {"interaction_id": f"{group}{row['id']}", "discount": 1.0, "credit": "tree", "value": 0.0}
            for group in range(1, groups)
            if group % OPEN_EACH
            for row in copied[interactions]
        ),
    }


def _session(row: Row, group: int, groups: int) -> Row:
    order = group * GROUP + row["number"]
    made = {
        **row,
        **{"number": order, "created_at": row["created_at"] - MINUTE_S * (groups - group + 2)},
        **{"session_id": f"{group}{row['session_id']}", "task_id": f"task-{group % 1000}", "group_id": f"{group}g"},
    }
    made["checksum"] = checksums.of_start(made)
    if not group % OPEN_EACH:
        return made
    made.update(_ended(made), ended_order=order)
    if group < groups - WAITING_GROUPS:
        made.update(acknowledged_at=made["ended_at"], exported_at=made["ended_at"])
    return made


def _turn(row: Row, group: int) -> Row:
    parent = row["parent_id"] and f"{group}{row['parent_id']}"
    made = {**row, "id": f"{group}{row['id']}", "session_id": f"{group}{row['session_id']}", "parent_id": parent}
    made["checksum"] = checksums.of_turn(made)
    return made


def _insert(connection: Connection, table: Table, rows: list[Row]) -> None:
    names = table.c.keys()
    values = [tuple(row.get(name) for name in names) for row in rows]
    columns = ", ".join(f'"{name}"' for name in names)
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(names))
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({columns}) VALUES ({marks})", values)
        return
    cursor = connection.connection.cursor()
    with cursor.copy(f"COPY {table.name} ({columns}) FROM STDIN") as copy:
        for row in values:
            copy.write_row(row)
