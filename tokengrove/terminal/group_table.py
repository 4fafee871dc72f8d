"""The list of groups of `GET /rl/groups` for a terminal, each with the distribution of its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tokengrove.terminal import figures
from tokengrove.terminal.fitting_table import Column, FittingTable
from tokengrove.terminal.session_table import versions

Entry = Mapping[str, Any]

_BARS = 10


def group_table(entries: Sequence[Entry], now: float, *, more: bool) -> FittingTable:
    """A table of `entries`. `now`: Unix seconds. `more`: whether there are further groups."""
    listed = "no group matches" if not entries else f"{len(entries)} groups{'; --limit lists more' if more else ''}"
    return FittingTable(_columns(now), entries, Text(listed, "dim"))


def _columns(now: float) -> list[Column]:
    return [
        Column("group", 0, 12, lambda group: figures.one_line(group["group_id"]), whole=True),
        Column("sessions", 2, 8, _sessions, right=True),
        Column("mean", 1, 6, lambda group: figures.number(group["mean"]), right=True),
        Column("std", 4, 6, lambda group: figures.number(group["std"]), right=True),
        Column("min", 6, 6, lambda group: figures.number(group["min"]), right=True),
        Column("scores", 3, _BARS, lambda group: figures.histogram(group["scores"], _BARS)),
        Column("max", 7, 6, lambda group: figures.number(group["max"])),
        Column("tokens", 8, 6, lambda group: figures.count(group["output_tokens"]), right=True),
        Column("version", 9, 7, lambda group: versions(group["versions"], None), right=True),
        Column("task", 10, 8, _tasks),
        Column("age", 5, 4, lambda group: figures.age(now - group["created_at"]), right=True),
    ]


def _sessions(group: Entry) -> Text:
    """The number of sessions, the group size, and the number of scored sessions if not all have a score."""
    scored = "" if group["rewarded"] == group["counted"] else f", {group['rewarded']} scored"
    size = f"/{group['group_size']}" if group["group_size"] else ""
    return Text.assemble(f"{group['sessions']}{size}", (scored, "yellow"))


def _tasks(group: Entry) -> str:
    names = [name for name in group["task_ids"] if name is not None]
    return figures.one_line(", ".join(names)) or figures.NONE
