"""The JSON of what trainers told of tokens: sums by sampler, and the streams of a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.side_columns.columns import ToldName, told_by, told_prefix
from proxy.side_columns.rows import SideColumn
from proxy.store.recordings import SessionReads
from proxy.trajectory.mismatch import ratio_of
from proxy.types import Interaction

_OF_A_TURN = ("interaction_id", "session_id", "trainer", "step", "noted_at")
_Columns = Mapping[str, Mapping[str, SideColumn]]


def sums_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Sums of tokens: `kl` is the mean over the compared ones, and null without any."""
    compared = int(row["compared"])
    rest = {name: value for name, value in row.items() if name not in ("kl", "log_ratio")}
    return {
        **rest,
        **{name: int(row[name]) for name in ("tokens", "masked", "clipped", "compared")},
        "kl": row["kl"] / compared if compared else None,
        "largest_ratio": ratio_of(row["log_ratio"]) if compared else None,
    }


def turns_json(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `annotations` by turn, trainer and step: `parts` are the runs of tokens that one sampler drew."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        head = {name: row[name] for name in _OF_A_TURN}
        entry = found.setdefault((row["interaction_id"], row["trainer"], row["step"]), {**head, "parts": []})
        entry["parts"].append(sums_json({name: value for name, value in row.items() if name not in _OF_A_TURN}))
    return list(found.values())


async def read_session(recordings: SessionReads, session_id: str) -> list[dict[str, Any]]:
    """What trainers told of each turn of a session: the names of the streams, the scalars, and the sums."""
    entries = turns_json(await recordings.load_annotations(session_id))
    told = _by_step(await recordings.load_told(session_id)) if entries else {}
    for entry in entries:
        columns = told.get((entry["interaction_id"], entry["trainer"], entry["step"]), {})
        entry["streams"] = sorted(each.name for each in columns if not each.whole)
        entry["scalars"] = _scalars(columns)
    return entries


async def read_turn(recordings: SessionReads, turn: Interaction) -> list[dict[str, Any]]:
    """What trainers told of a turn: by trainer and step, the values of each stream for each token of the output."""
    told = _by_step(await recordings.load_told(turn.session_id, turn.id))
    return await asyncio.to_thread(_streams_json, told)


async def read_stream(
    recordings: SessionReads, session_id: str, trainer: str, step: int, name: str
) -> dict[str, list[float | None]]:
    """The values of a stream for each token of the outputs of a session, by interaction id."""
    full_name = told_prefix(trainer, step) + name
    told = await recordings.load_columns(session_id, [full_name])
    return await asyncio.to_thread(lambda: {each: _values(columns[full_name]) for each, columns in told.items()})


def _values(column: SideColumn) -> list[float | None]:
    return [None if value != value else value for value in column.rows.values.tolist()]


def _streams_json(told: Mapping[tuple[str, str, int], Mapping[ToldName, SideColumn]]) -> list[dict[str, Any]]:
    return [
        {
            "trainer": trainer,
            "step": step,
            "streams": {each.name: _values(column) for each, column in sorted(columns.items()) if not each.whole},
            "scalars": _scalars(columns),
        }
        for (_, trainer, step), columns in sorted(told.items())
    ]


def _scalars(columns: Mapping[ToldName, SideColumn]) -> dict[str, float]:
    return {each.name: float(column.rows.values[0]) for each, column in sorted(columns.items()) if each.whole}


def _by_step(columns: _Columns) -> dict[tuple[str, str, int], dict[ToldName, SideColumn]]:
    found: dict[tuple[str, str, int], dict[ToldName, SideColumn]] = {}
    for interaction_id, named in columns.items():
        for name, column in named.items():
            if (told := told_by(name)) is not None:
                found.setdefault((interaction_id, told.trainer, told.step), {})[told] = column
    return found
