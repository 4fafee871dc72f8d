"""Checksums of the values of a row that never change: XXH3-128 of the values as they are stored.

A row has the same checksum in SQLite and in PostgreSQL, before a dump and after its import. A value is hashed with the
name of its column, and NULL is skipped, so a column that a later release adds does not change older checksums.

Columns that change after their row was written:

- interactions: rewards and marks set `reward`, `rewards`, `token_rewards`, `trainable` and `spans`. `status` becomes
  `superseded` if it was failed or aborted; whether it is complete never changes and is included.
- sessions: an import assigns `number` and `ended_order` again; keys are rotated; counters, claims and times of use
  change, and a session may be withdrawn. The fields of an end have a separate checksum, `end_checksum`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from operator import index
from struct import Struct
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, Double, Integer, RowMapping, Table, Text, bindparam, update
from xxhash import xxh3_128_digest

from proxy.store.sql.statement import Statement
from proxy.store.sql.tables import interactions, sessions
from tokengrove.reasons import Status

CHANGED_OF_TURNS = frozenset({"status", "reward", "rewards", "token_rewards", "trainable", "spans"})
"""The columns of an interaction that change. All others are included, except for the checksum itself."""
OF_STARTS = frozenset(
    {
        *("session_id", "task_id", "group_id", "group_size", "series", "validation", "weight_version", "created_at"),
        *("sampling", "turn_options", "limits", "metadata", "discount", "credit", "reward_scope", "took_capacity"),
        "delivery",
    }
)
"""The columns of a session that its start sets permanently."""
OF_ENDS = frozenset({"status", "outcome", "exit_reason", "finished", "metrics", "score", "ended_at"})
"""The columns of a session that its end sets permanently."""

_pack = Struct("<d").pack
_COMPLETE = Status.COMPLETE.value


# Integers rather than an enum: in CPython 3.11, `Enum.MEMBER` costs ten times as much as a global.
_TEXT, _WHOLE, _DOUBLE, _BYTES = range(4)
Columns = Sequence[tuple[str, bytes, int]]
"""Of each column its name, what precedes its value, and the kind of its values."""
_LENGTHS = tuple(b"%d " % length for length in range(4096))


def _columns(table: Table, names: Collection[str]) -> Columns:
    """The column data that a checksum needs, ordered by column name."""
    kinds: dict[type[Any], int] = {Text: _TEXT, Double: _DOUBLE}
    kinds |= dict.fromkeys((Boolean, Integer, BigInteger), _WHOLE)
    return [(name, name.encode() + b" ", kinds.get(type(table.c[name].type), _BYTES)) for name in sorted(names)]


_TURN = _columns(interactions, {*interactions.c.keys()} - CHANGED_OF_TURNS - {"checksum"})
_START, _END = _columns(sessions, OF_STARTS), _columns(sessions, OF_ENDS)


def of_turn(row: RowMapping | Mapping[str, Any]) -> bytes:
    """The checksum of an interaction, from its column values as they are written or as a driver reads them.

    Raises AttributeError, TypeError or struct.error for a value whose type does not match its column.
    """
    return _digest(b"complete " if row["status"] == _COMPLETE else b"lost ", row, _TURN)


def of_start(row: RowMapping | Mapping[str, Any]) -> bytes:
    """The checksum of a session's start; see `of_turn`."""
    return _digest(b"start ", row, _START)


def of_end(row: RowMapping | Mapping[str, Any]) -> bytes:
    """The checksum of a session's end; see `of_turn`."""
    return _digest(b"end ", row, _END)


def _digest(head: bytes, row: RowMapping | Mapping[str, Any], columns: Columns) -> bytes:
    """The checksum of a row. It is one loop for speed, because every committed turn runs it."""
    parts = [head]
    append, get = parts.append, row.get
    text, whole, double, lengths, known = _TEXT, _WHOLE, _DOUBLE, _LENGTHS, len(_LENGTHS)
    for name, tag, kind in columns:
        value = get(name)
        if value is None:
            continue
        if kind == text:
            value = value.encode("utf-8", "surrogateescape")
        elif kind == whole:
            value = b"%d" % index(value)
        elif kind == double:
            value = _pack(value)
        size = len(value)
        append(tag)
        append(lengths[size] if size < known else b"%d " % size)
        append(value)
    return xxh3_128_digest(b"".join(parts))


def _set(table: Table, key: str, column: str) -> Statement:
    missing = (table.c[key] == bindparam("of_key"), table.c[column].is_(None))
    return Statement(update(table).where(*missing).values({column: bindparam("digest")}))


class Missing(Enum):
    """The checksums that a row may lack."""

    TURN = "turn"
    START = "start"
    END = "end"


_FILL = {
    Missing.TURN: _set(interactions, "id", "checksum"),
    Missing.START: _set(sessions, "session_id", "checksum"),
    Missing.END: _set(sessions, "session_id", "end_checksum"),
}


def fill(connection: Connection, missing: Mapping[Missing, Sequence[tuple[str, bytes]]]) -> None:
    """Store checksums by the id of the interaction or the session, unless there already is one."""
    for kind, digests in missing.items():
        if digests:
            rows = [{"of_key": key, "digest": digest} for key, digest in digests]
            _FILL[kind].run(connection, rows)
