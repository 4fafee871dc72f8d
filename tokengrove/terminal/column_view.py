"""The side columns of sampled tokens for a terminal: one line per token, with a column for each kind that it has.

A missing row is the word `missing`, so it is never taken for an empty set or for expert 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokengrove.terminal import figures

Columns = Mapping[str, Any]
"""The part `columns` of a turn, requested with `include=columns`."""

MISSING = "missing"
_TEXTS = 5
"""Kept ids whose texts are shown."""
_EXPERTS = 60
"""Characters shown of the experts of a token."""
_TOKEN = 24
"""Characters shown of a token."""


def column_view(columns: Columns, tokens: Mapping[str, Any], count: int) -> RenderableType:
    """The rows of a page of tokens. `count`: the number of sampled tokens of the turn, of which it has the first."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("token", justify="right")
    table.add_column("text", no_wrap=True)
    kinds = [kind for kind in _CELLS if columns[kind] is not None]
    for kind in kinds:
        for name in _CELLS[kind].names:
            table.add_column(name, overflow="fold")
    for at in range(columns["start"], columns["end"]):
        row = at - columns["start"]
        cells = [cell for kind in kinds for cell in _CELLS[kind].of(columns[kind][row], columns["vocab_size"])]
        table.add_row(str(at), _token(tokens, at), *cells)
    shown = columns["end"] - columns["start"]
    rest = [Text(f"… and {count - shown} more: --whole", "dim")] if shown < count else []
    return Group(Text(), table, *rest)


def _token(tokens: Mapping[str, Any], at: int) -> Text:
    return Text(_spelled(tokens["texts"][at], tokens["ids"][at]), "green")


def _spelled(text: str | None, token: int) -> str:
    """A token in quotes; its id without a tokenizer."""
    return str(token) if text is None else f"'{figures.one_line(text, _TOKEN)}'"


def _kept(row: Mapping[str, Any] | None, vocab_size: int | None) -> Sequence[Text]:
    if row is None:
        return [_missing(), Text(), Text()]
    number = f"all but {row['number']:,}" if row["excluded"] else f"{row['number']:,}"
    of = "" if vocab_size is None else f" of {vocab_size:,}"
    texts = [_spelled(text, token) for text, token in zip(row["texts"], row["ids"], strict=True)][:_TEXTS]
    more = "" if row["number"] <= len(texts) else " …"
    listed = ("not " if row["excluded"] and texts else "") + " ".join(texts) + more
    return [Text(f"{number}{of}"), Text(figures.number(row["mass"])), Text(listed)]


def _experts(row: Sequence[Sequence[int | None]] | None, _: int | None) -> Sequence[Text]:
    if row is None:
        return [_missing()]
    layers = [" ".join("-" if each is None else str(each) for each in layer) for layer in row]
    return [Text(figures.one_line(" | ".join(layers), _EXPERTS))]


def _alternatives(row: Sequence[Sequence[Any]] | None, _: int | None) -> Sequence[Text]:
    if row is None:
        return [_missing()]
    return [Text(" ".join(f"{_spelled(text, token)} {figures.number(value)}" for token, text, value in row))]


def _missing() -> Text:
    return Text(MISSING, "yellow")


class _Cells(NamedTuple):
    """The cells of one kind of row: their headings, and their texts for a row and the size of the vocabulary."""

    names: Sequence[str]
    of: Callable[[Any, int | None], Sequence[Text]]


_CELLS = {
    "kept": _Cells(("kept", "mass", "ids"), _kept),
    "experts": _Cells(("experts of each layer",), _experts),
    "alternatives": _Cells(("alternatives",), _alternatives),
}
