"""What trainers told of tokens: streams in `side_columns`, and sums by trainer, step and sampler in `annotations`.

A value that is stored never changes: the same value again has no effect, and another value is refused.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Select,
    bindparam,
    delete,
    distinct,
    exists,
    func,
    insert,
    literal_column,
    select,
    text,
)

from proxy.side_columns.columns import TOLD, StoredColumn, loaded, told_prefix
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.store.notes import note_fields
from proxy.store.sql import codec
from proxy.store.sql.locks import lock_sessions
from proxy.store.sql.rows import pairs_of
from proxy.store.sql.side_columns import column_rows
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import annotated, interactions, sessions, side_columns
from proxy.trajectory.mismatch import Part, parts_of
from proxy.trajectory.told import Floats, Output, Told
from proxy.types import Sampler
from tokengrove.errors import AnnotatedOtherwise, NotFound, brief
from tokengrove.reasons import Status

_NAMES = side_columns.c.keys()
_FIELDS = [side_columns.c[name] for name in StoredColumn._fields]
_PUT = Statement(
    text(
        f"INSERT INTO side_columns ({', '.join(_NAMES)}) VALUES (:{', :'.join(_NAMES)}) "
        "ON CONFLICT (interaction_id, name) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in _NAMES if name not in ("interaction_id", "name"))
    )
)
_STORED = Statement(
    select(side_columns.c.interaction_id, *_FIELDS).where(
        Named(side_columns.c.interaction_id),
        func.substr(side_columns.c.name, literal_column("1"), bindparam("size", type_=Integer)) == bindparam("prefix"),
    )
)
_OUTPUTS = Statement(
    select(
        *(interactions.c.id, interactions.c.session_id, interactions.c.prompt_tokens),
        *(interactions.c.logprobs, interactions.c.versions, interactions.c.notes),
    ).where(Named(interactions.c.id), interactions.c.status == bindparam("status"))
)
_FORGET = Statement(
    delete(annotated).where(
        Named(annotated.c.interaction_id),
        annotated.c.trainer == bindparam("of_trainer"),
        annotated.c.step == bindparam("of_step", type_=BigInteger),
    )
)
_INSERT = Statement(insert(annotated))
_OF_SESSIONS = Statement(
    select(
        annotated.c.session_id,
        *(func.sum(annotated.c.compared), func.sum(annotated.c.kl), func.max(annotated.c.log_ratio)),
    )
    .where(Named(annotated.c.session_id))
    .group_by(annotated.c.session_id)
)
_COLUMNS = annotated.c.keys()
_THERE = Statement(select(interactions.c.id).where(Named(interactions.c.id)))


def load_outputs(connection: Connection, ids: Collection[str]) -> dict[str, Output]:
    """The outputs of complete interactions, by id. Unknown ids are ignored."""
    found = {}
    asked = {"names": json_list(ids), "status": Status.COMPLETE.value}
    for each, session_id, start, logprobs, versions, notes in _OUTPUTS.fetch(connection, asked):
        fields, values = note_fields(codec.decode_json(notes, {})), np.asarray(codec.decode_floats(logprobs))
        found[each] = Output(
            *(session_id, each, start, len(values)),
            logprobs=values if fields["has_logprobs"] else None,
            versions=pairs_of(versions),
            samplers=fields["samplers"],
        )
    return found


def annotate(connection: Connection, batch: Sequence[Told]) -> Sequence[list[list[Part] | None]]:
    """Store what trainers told. Returns the parts of each of its turns, None for a turn of which nothing is new.

    Raises NotFound for an interaction that was deleted meanwhile, and AnnotatedOtherwise for a value other than the
    stored one.
    """
    return [_annotate(connection, told) for told in batch]


def _annotate(connection: Connection, told: Told) -> list[list[Part] | None]:
    lock_sessions(connection, told.session_ids)
    names = json_list(output.interaction_id for output, _, _ in told.turns)
    there = {each for (each,) in _THERE.fetch(connection, {"names": names})}
    prefix = told_prefix(told.trainer, told.step)
    stored: dict[str, dict[str, SideColumn]] = defaultdict(dict)
    for interaction_id, *row in _STORED.fetch(connection, {"names": names, "size": len(prefix), "prefix": prefix}):
        column = StoredColumn(*row)
        stored[interaction_id][column.name.removeprefix(prefix)] = loaded(column)
    columns: list[dict[str, Any]] = []
    changed: list[tuple[Output, list[Part]]] = []
    found: list[list[Part] | None] = []
    for output, streams, values in told.turns:
        if output.interaction_id not in there:
            raise NotFound(f"no complete turn has the id {brief(output.interaction_id)}", param="samples")
        known = stored[output.interaction_id]
        new = _new(output, streams, values, known)
        if not new:
            found.append(None)
            continue
        columns += column_rows(
            output.session_id, output.interaction_id, {prefix + name: column for name, column in new.items()}
        )
        parts = parts_of(output, _streams(output, {**known, **new}))
        changed.append((output, parts))
        found.append(parts)
    if columns:
        _PUT.run(connection, columns)
    _put_parts(connection, told, changed)
    return found


def _new(
    output: Output, streams: Mapping[str, Floats], values: Mapping[str, float], known: Mapping[str, SideColumn]
) -> dict[str, SideColumn]:
    """The columns that change, by name. Raises AnnotatedOtherwise."""
    new = {name: np.asarray(stream, np.float32) for name, stream in streams.items()}
    new |= {f"={name}": np.asarray([value], np.float64) for name, value in values.items()}
    found = {}
    for name, rows in new.items():
        if (old := known.get(name)) is not None:
            rows = _merged(output, name, old.rows.values, rows)
            if np.array_equal(rows, old.rows.values, equal_nan=True):
                continue
        found[name] = SideColumn(output.start, SideRows(rows))
    return found


def _merged(output: Output, name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if len(differing := np.flatnonzero(~np.isnan(old) & ~np.isnan(new) & (old != new))):
        at = int(differing[0])
        what = f"token {at}" if not name.startswith("=") else "it"
        raise AnnotatedOtherwise(
            f"{brief(name.removeprefix('='))} of {what} of the turn {brief(output.interaction_id)} is {old[at]:g} "
            f"already, not {new[at]:g}: what is told of a step never changes; use another step or name",
            param="samples",
        )
    return np.where(np.isnan(old), new, old)


def _streams(output: Output, columns: Mapping[str, SideColumn]) -> dict[str, Floats]:
    """The streams of an output; one that has none was told values only, of no token."""
    found = {name: column.rows.values for name, column in columns.items() if not name.startswith("=")}
    return found or {"": np.full(output.tokens, np.nan, np.float32)}


def _put_parts(connection: Connection, told: Told, changed: Sequence[tuple[Output, list[Part]]]) -> None:
    now = time.time()
    rows = [
        {
            "interaction_id": output.interaction_id,
            "session_id": output.session_id,
            "trainer": told.trainer,
            "step": told.step,
            "noted_at": now,
            **part._asdict(),
            **part.sampler._asdict(),
        }
        for output, parts in changed
        for part in parts or [_nothing(output)]
    ]
    if rows:
        names = json_list(output.interaction_id for output, _ in changed)
        _FORGET.run(connection, [{"names": names, "of_trainer": told.trainer, "of_step": told.step}])
        _INSERT.run(connection, [{name: row[name] for name in _COLUMNS} for row in rows])


def _nothing(output: Output) -> Part:
    """The part of a turn without streams, so that it is known to be in the step."""
    sampler = output.samplers[0][1] if output.samplers else Sampler()
    version = output.versions[0][1] if output.versions else 0
    return Part(0, version, sampler, 0, 0, 0, 0, 0.0, 0.0)


_SUMS = (
    func.max(annotated.c.noted_at).label("noted_at"),
    func.count(distinct(annotated.c.session_id)).label("sessions"),
    func.count(distinct(annotated.c.interaction_id)).label("turns"),
    *(func.sum(annotated.c[name]).label(name) for name in ("tokens", "masked", "clipped", "compared", "kl")),
    func.max(annotated.c.log_ratio).label("log_ratio"),
)
_OF_SAMPLER = ("server", "version", "dtype", "quantization")


def steps(connection: Connection, trainer: str | None, before: int | None, most: int) -> list[dict[str, Any]]:
    """The newest steps with their sums, by step from the last on, those of several trainers together."""
    query = select(annotated.c.trainer, annotated.c.step, *_SUMS).group_by(annotated.c.trainer, annotated.c.step)
    query = query.order_by(annotated.c.step.desc(), annotated.c.trainer).limit(most)
    if trainer is not None:
        query = query.where(annotated.c.trainer == trainer)
    if before is not None:
        query = query.where(annotated.c.step < before)
    return [dict(row) for row in connection.execute(query).mappings()]


def samplers(connection: Connection, trainer: str | None, first: int | None, last: int | None) -> list[dict[str, Any]]:
    """The sums of steps [first, last] by trainer, server, weight version, dtype and quantisation."""
    by = [annotated.c[name] for name in ("trainer", *_OF_SAMPLER)]
    query = select(*by, *_SUMS).group_by(*by).order_by(*by)
    if trainer is not None:
        query = query.where(annotated.c.trainer == trainer)
    if first is not None:
        query = query.where(annotated.c.step >= first)
    if last is not None:
        query = query.where(annotated.c.step <= last)
    return [dict(row) for row in connection.execute(query).mappings()]


def parts_of_step(
    connection: Connection, trainer: str, step: int, after: str | None, most: int
) -> list[dict[str, Any]]:
    """What a trainer told in a step, by interaction id from that after `after` on, of at most `most` turns."""
    of_step = (annotated.c.trainer == trainer) & (annotated.c.step == step)
    turns = select(annotated.c.interaction_id).where(of_step).distinct().order_by(annotated.c.interaction_id)
    if after is not None:
        turns = turns.where(annotated.c.interaction_id > after)
    page = list(connection.execute(turns.limit(most)).scalars())
    return _rows(connection, select(annotated).where(of_step, annotated.c.interaction_id.in_(page)))


def parts_of_session(connection: Connection, session_id: str) -> list[dict[str, Any]]:
    """What trainers told of the turns of a session."""
    return _rows(connection, select(annotated).where(annotated.c.session_id == session_id))


def sums_of_sessions(connection: Connection, session_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """`compared`, the sum `kl` and the largest `log_ratio` of each of these sessions that a trainer told about."""
    found = _OF_SESSIONS.fetch(connection, {"names": json_list(session_ids)})
    return {name: {"compared": compared, "kl": kl, "log_ratio": ratio} for name, compared, kl, ratio in found}


def load_told(connection: Connection, session_id: str, interaction_id: str | None) -> list[tuple[str, StoredColumn]]:
    """The columns that trainers told of the turns of a session, or of one, each with the id of its interaction."""
    query = select(side_columns.c.interaction_id, *_FIELDS).where(
        side_columns.c.session_id == session_id, func.substr(side_columns.c.name, 1, len(TOLD)) == TOLD
    )
    if interaction_id is not None:
        query = query.where(side_columns.c.interaction_id == interaction_id)
    return [(each, StoredColumn(*row)) for each, *row in connection.execute(query)]


def _rows(connection: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    order = [annotated.c[name] for name in ("interaction_id", "trainer", "step", "first")]
    return [dict(row) for row in connection.execute(query.order_by(*order)).mappings()]


def drop_stray_annotations(connection: Connection, most: int) -> int:
    """Delete rows of up to `most` sessions that an older server deleted; return the number of rows."""
    known = exists().where(sessions.c.session_id == annotated.c.session_id)
    strays = list(connection.execute(select(annotated.c.session_id).where(~known).distinct().limit(most)).scalars())
    if not strays:
        return 0
    return connection.execute(delete(annotated).where(annotated.c.session_id.in_(strays))).rowcount
