"""What trainers told of the turns of a session, one line for each turn and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tokengrove.terminal import figures
from tokengrove.terminal.fitting_table import Column, FittingTable

Entry = Mapping[str, Any]


def trained_table(turns: Sequence[Entry], numbers: Mapping[str, int | None]) -> FittingTable:
    """A table of the answer of `GET /rl/sessions/{session}/annotations`. `numbers`: of turns by interaction id."""

    def order(entry: Entry) -> tuple[Any, ...]:
        return numbers.get(entry["interaction_id"]) or 0, entry["trainer"], entry["step"]

    columns = [
        Column("turn", 0, 4, lambda entry: str(numbers.get(entry["interaction_id"], figures.NONE)), right=True),
        Column("trainer", 1, 7, lambda entry: figures.one_line(entry["trainer"])),
        Column("step", 0, 4, lambda entry: str(entry["step"]), right=True),
        Column("tokens", 2, 6, lambda entry: figures.count(_sum(entry, "tokens")), right=True),
        Column("masked", 3, 6, lambda entry: figures.count(_sum(entry, "masked")), right=True),
        Column("clipped", 3, 7, lambda entry: figures.count(_sum(entry, "clipped")), right=True),
        Column("KL", 2, 8, lambda entry: figures.number(_kl(entry)), right=True),
        Column("largest ratio", 4, 8, lambda entry: figures.number(_ratio(entry)), right=True),
        Column("sampled by", 5, 10, _samplers),
        Column("streams", 6, 10, lambda entry: figures.one_line(", ".join(entry["streams"]) or figures.NONE)),
        Column("scalars", 5, 10, _scalars),
    ]
    beneath = Text("" if turns else "no trainer told anything of this session", "dim")
    return FittingTable(columns, sorted(turns, key=order), beneath)


def _sum(entry: Entry, name: str) -> int:
    return sum(part[name] for part in entry["parts"])


def _kl(entry: Entry) -> float | None:
    compared = _sum(entry, "compared")
    told = [part["kl"] * part["compared"] for part in entry["parts"] if part["compared"]]
    return math.fsum(told) / compared if compared else None


def _ratio(entry: Entry) -> float | None:
    return max((part["largest_ratio"] for part in entry["parts"] if part["compared"]), default=None)


def _samplers(entry: Entry) -> str:
    """Server, dtype, quantisation and weight version of each part."""
    told = [
        " ".join(filter(None, (part["server"], part["dtype"], part["quantization"], f"v{part['version']}")))
        for part in entry["parts"]
    ]
    return figures.one_line(", ".join(dict.fromkeys(told)))


def _scalars(entry: Entry) -> str:
    told = ", ".join(f"{name} {figures.number(value)}" for name, value in entry["scalars"].items())
    return figures.one_line(told or figures.NONE)
