"""Side columns: written with their turn, deleted with their session, and read by session.

A column may have tens of megabytes, so `each_row` reads them one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, delete, exists, func, insert, select, text, type_coerce
from sqlalchemy.types import NullType
from xxhash import xxh3_128_digest

from proxy.side_columns.columns import Columns, StoredColumn, stored
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import interactions, side_columns

_STRAY = ~exists().where(interactions.c.id == side_columns.c.interaction_id)
_FIELDS = [side_columns.c[name] for name in StoredColumn._fields]
_INSERT = Statement(insert(side_columns))
_NAMES = side_columns.c.keys()
_INSERT_NEW = Statement(
    text(
        f"INSERT INTO side_columns ({', '.join(_NAMES)}) VALUES (:{', :'.join(_NAMES)}) "
        "ON CONFLICT (interaction_id, name) DO NOTHING"
    )
)
_THERE = Statement(select(interactions.c.id).where(Named(interactions.c.id)))
_LOAD = Statement(
    select(side_columns.c.interaction_id, *_FIELDS).where(
        side_columns.c.session_id == bindparam("of_session"), Named(side_columns.c.name)
    )
)
_LOAD_TURNS = Statement(
    select(side_columns.c.interaction_id, *_FIELDS).where(
        side_columns.c.session_id == bindparam("of_session"), Named(side_columns.c.interaction_id)
    )
)
_SIZES = Statement(
    select(side_columns.c.name, side_columns.c.number).where(
        side_columns.c.session_id == bindparam("of_session"),
        side_columns.c.interaction_id == bindparam("of_interaction"),
    )
)
_KINDS = Statement(
    select(side_columns.c.name, side_columns.c.dtype, side_columns.c.shape)
    .where(Named(side_columns.c.session_id))
    .distinct()
)


def column_rows(session_id: str, interaction_id: str, columns: Columns) -> list[dict[str, Any]]:
    """The rows of the columns of an interaction, with their checksums."""
    ids = {"session_id": session_id, "interaction_id": interaction_id}
    rows = [{**ids, **stored(name, column)._asdict()} for name, column in columns.items()]
    return [{**row, "checksum": checksum_of(row)} for row in rows]


def checksum_of(row: Mapping[str, Any]) -> bytes:
    """The checksum of a row of `side_columns`, from its values."""
    told = [row["interaction_id"], *(str(row[name]) for name in ("name", "start", "number", "dtype", "shape"))]
    return xxh3_128_digest(" ".join(told).encode() + b" " + row["data"])


def insert_columns(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store rows of columns."""
    _INSERT.run(connection, rows)


def insert_scores(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store scores of interactions that exist. Columns that are stored already stay as they are."""
    there = set(_THERE.fetch(connection, {"names": json_list({row["interaction_id"] for row in rows})}))
    if new := [row for row in rows if (row["interaction_id"],) in there]:
        _INSERT_NEW.run(connection, new)


def load_columns(connection: Connection, session_id: str, names: Collection[str]) -> list[tuple[str, StoredColumn]]:
    """The columns of these names of a session, each with the id of its interaction."""
    found = _LOAD.fetch(connection, {"of_session": session_id, "names": json_list(names)})
    return [(interaction_id, StoredColumn(*row)) for interaction_id, *row in found]


def load_turn_columns(
    connection: Connection, session_id: str, interaction_ids: Collection[str]
) -> list[tuple[str, StoredColumn]]:
    """All columns of some interactions of a session, each with the id of its interaction."""
    found = _LOAD_TURNS.fetch(connection, {"of_session": session_id, "names": json_list(interaction_ids)})
    return [(interaction_id, StoredColumn(*row)) for interaction_id, *row in found]


def column_sizes(connection: Connection, session_id: str, interaction_id: str) -> dict[str, int]:
    """The number of rows of each stored column of an interaction, by name."""
    found = _SIZES.fetch(connection, {"of_session": session_id, "of_interaction": interaction_id})
    return {name: number for name, number in found}


def column_kinds(connection: Connection, session_ids: Collection[str]) -> list[tuple[str, str, str]]:
    """Name, dtype and shape of the columns of sessions, each once."""
    found = _KINDS.fetch(connection, {"names": json_list(session_ids)})
    return [(name, dtype, shape) for name, dtype, shape in found]


def each_row(connection: Connection, session_id: str) -> Iterator[RowMapping]:
    """Yield the rows of a session's columns as the driver returns them, with one in memory at a time."""
    keys = [side_columns.c.interaction_id, side_columns.c.name]
    query = select(*keys).where(side_columns.c.session_id == session_id).order_by(*keys)
    row = select(*(type_coerce(each, NullType()).label(each.name) for each in side_columns.c))
    for interaction_id, name in connection.execute(query).all():
        of_key = row.where(side_columns.c.interaction_id == interaction_id, side_columns.c.name == name)
        yield connection.execute(of_key).mappings().one()


def count_strays(connection: Connection) -> int:
    """The number of columns without an interaction, which older servers leave behind when they delete its session."""
    return int(connection.execute(select(func.count()).select_from(side_columns).where(_STRAY)).scalar_one())


def drop_stray_columns(connection: Connection, most: int) -> int:
    """Delete the columns without an interaction of at most `most` interactions; return the number of columns."""
    query = select(side_columns.c.interaction_id).where(_STRAY).distinct().limit(most)
    found = list(connection.execute(query).scalars())
    if not found:
        return 0
    return connection.execute(delete(side_columns).where(side_columns.c.interaction_id.in_(found), _STRAY)).rowcount


def drop_strays_of(connection: Connection, session_id: str) -> None:
    """Delete what is left of an earlier session of this name, which has no interactions."""
    connection.execute(delete(side_columns).where(side_columns.c.session_id == session_id, _STRAY))


def drop_columns(connection: Connection, session_ids: Collection[str]) -> int:
    """Delete the columns of sessions, and keep their turns; return the number of columns."""
    return connection.execute(delete(side_columns).where(side_columns.c.session_id.in_(session_ids))).rowcount
