"""The JSON of a turn's side columns: how much it recorded (`include=replay`), and rows by token (`include=columns`).

A missing row is null, never zero. A page has at most `MOST_ROWS` tokens, and only the columns of the turns that
brought them are read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from proxy.protocols.fields import optional_int
from proxy.rendering.token_texts import TokenTexts
from proxy.side_columns.columns import DECLARED, EXPERTS, KEPT, KEPT_LOGPROBS, TOP_IDS, TOP_LOGPROBS, Columns
from proxy.side_columns.rows import SideRows
from proxy.store.recordings import SessionReads
from proxy.trajectory.path_columns import PathColumns
from proxy.trajectory.token_path import token_path
from proxy.trajectory.tree import Branch, build_tree
from proxy.types import Interaction
from tokengrove.errors import InvalidRequest
from tokengrove.options.export import Drift
from tokengrove.reasons import LogprobsOf
from tokengrove.rows_beside import missing_value

MOST_ROWS = 256
"""The most tokens of a page."""
ROWS = 64
"""The tokens of a page, unless a query says otherwise."""
PAGE_OPTIONS = ("start", "limit")
"""The query parameters of a page."""
_LISTED = 32
"""The most ids of a set that a row lists."""
_DIGITS = 6

Row = dict[str, Any] | list[Any] | None


@dataclass(frozen=True, slots=True)
class RowPage:
    """Which tokens of a path: `limit` from index `start` on; None: from the first token of the turn's output. `drift`:
    of the export that has the path."""

    start: int | None = None
    limit: int = ROWS
    drift: Drift = Drift.FORK


class Vocabulary(NamedTuple):
    """`texts`: spells ids; without it all texts are null. `size`: the number of ids of the model, if it is known."""

    texts: TokenTexts | None = None
    size: int | None = None


def parse_page(query: Mapping[str, str], drift: Drift) -> RowPage:
    """The page in a query. Raises InvalidRequest, which names the parameter."""
    given = {name: _number(query[name], name) for name in PAGE_OPTIONS if name in query}
    limit = optional_int(given, "limit", least=1, most=MOST_ROWS)
    return RowPage(optional_int(given, "start", least=0), ROWS if limit is None else limit, drift)


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InvalidRequest(f"'{name}' must be an integer", param=name)
    return int(text)


async def read_replay(recordings: SessionReads, turn: Interaction) -> dict[str, Any]:
    """What a turn recorded: by column, the number of `rows`, how many of them were `missing`, and whether the column is
    `stored`. A column without any row is not stored; others are, unless they were pruned."""
    sizes = await recordings.column_sizes(turn.session_id, turn.id) if turn.replay else {}
    return {
        name: {"rows": sizes.get(name, _rows(name, missing, turn)), "missing": missing, "stored": name in sizes}
        for name, missing in turn.replay.items()
    }


def _rows(name: str, missing: int, turn: Interaction) -> int:
    """The number of rows of a column that is not stored."""
    if name not in DECLARED:  # of a newer release
        return missing
    start, end = DECLARED[name].span(turn.prefix_length, turn.prompt_tokens, len(turn.output_ids))
    return end - start


async def read_columns(
    recordings: SessionReads,
    interactions: Sequence[Interaction],
    turn: Interaction,
    page: RowPage,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """The rows of a page of a turn's path. `interactions`: all of its session, in order of `seq`.

    A column that none of the turns recorded is null. Raises InvalidRequest for a start beyond the path.
    """
    columns = await asyncio.to_thread(_path_columns, interactions, turn, page)
    recorded = [each.id for each in columns.turns if each.replay]
    stored = await recordings.load_turn_columns(turn.session_id, recorded) if recorded else {}
    return await asyncio.to_thread(_Rows(columns, stored, vocabulary).to_json)


def _path_columns(interactions: Sequence[Interaction], turn: Interaction, page: RowPage) -> PathColumns:
    nodes = build_tree(interactions)
    path = token_path(nodes.get(turn.id) or Branch(turn, nodes.get(turn.parent_id or ""), 0), page.drift)
    start = turn.prompt_tokens if page.start is None else page.start
    if start > len(path.ids):
        raise InvalidRequest(f"'start' is {start}, and the turn has {len(path.ids)} tokens", param="start")
    return PathColumns(path, start, min(start + page.limit, len(path.ids)))


class _Rows:
    """Rows of tokens as JSON."""

    def __init__(self, columns: PathColumns, stored: Mapping[str, Columns], vocabulary: Vocabulary) -> None:
        self._columns, self._stored, self._vocabulary = columns, stored, vocabulary
        self._number = columns.end - columns.start
        self._sampled = _sampled(columns)

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self._columns.start,
            "end": self._columns.end,
            "vocab_size": self._vocabulary.size,
            "kept": self._kept() if self._columns.are_recorded(KEPT) else None,
            "experts": self._experts() if self._columns.are_recorded(EXPERTS) else None,
            "alternatives": self._alternatives() if self._columns.are_recorded(TOP_LOGPROBS) else None,
        }

    def _rows(self, name: str) -> SideRows | None:
        return self._columns.rows(name, self._stored)

    def _blank(self) -> list[Row]:
        return [None] * self._number

    def _kept(self) -> list[Row]:
        rows, logprobs = self._rows(KEPT), self._rows(KEPT_LOGPROBS)
        if rows is None or rows.counts is None:
            return self._blank()
        found = self._blank()
        likely = self._likely()
        for at, (count, ids) in enumerate(zip(rows.counts.tolist(), rows.sets(), strict=True)):
            if count:
                beyond = math.nan if logprobs is None else float(logprobs.values[at])
                found[at] = {**self._set(count, ids.tolist(), likely[at]), "mass": self._mass(at, beyond)}
        return found

    def _set(self, count: int, ids: list[int], likely: Mapping[int, float]) -> dict[str, Any]:
        """A kept set. Its ids of which the logprob is known come first, the likeliest of them before the others."""
        listed = sorted(ids, key=lambda each: (-likely.get(each, -math.inf), each))[:_LISTED]
        return {
            "number": len(ids),
            "excluded": count < 0,
            "ids": listed,
            "texts": [self._text(each) for each in listed],
            "more": len(ids) - len(listed),
        }

    def _likely(self) -> list[dict[int, float]]:
        """The known logprobs of each token: of its alternatives, and of the sampled id."""
        pairs = [{token: value for token, value in each} for each in self._top()]
        for at, (token, logprob, _) in self._sampled.items():
            if logprob is not None:
                pairs[at][token] = logprob
        return pairs

    def _mass(self, at: int, beyond: float) -> float | None:
        """The probability of the kept set, before truncation; None if one of the two logprobs is not known."""
        if at not in self._sampled or math.isnan(beyond):
            return None
        _, logprob, by_rule = self._sampled[at]
        if logprob is None or not by_rule:
            return None
        return float(f"{math.exp(logprob - beyond):.{_DIGITS}g}")

    def _experts(self) -> list[Row]:
        rows = self._rows(EXPERTS)
        if rows is None:
            return self._blank()
        blank, absent = missing_value(rows.values.dtype), rows.missing
        found: list[Row] = []
        for at, layers in enumerate(rows.values.tolist()):
            wide = [[None if each == blank else each for each in chosen] for chosen in layers]
            found.append(None if absent[at] else wide)
        return found

    def _alternatives(self) -> list[Row]:
        return [[[token, self._text(token), value] for token, value in row] or None for row in self._top()]

    def _top(self) -> list[list[tuple[int, float]]]:
        """The alternatives of each token, likeliest first; none for a token without."""
        ids, logprobs = self._rows(TOP_IDS), self._rows(TOP_LOGPROBS)
        if ids is None or logprobs is None:
            return [[] for _ in range(self._number)]
        present = ids.values != missing_value(ids.values.dtype)
        return [
            [(token, _short(value)) for token, value, there in zip(*row, strict=True) if there]
            for row in zip(ids.values.tolist(), logprobs.values.tolist(), present.tolist(), strict=True)
        ]

    def _text(self, token: int) -> str | None:
        texts = self._vocabulary.texts
        return None if texts is None else texts.of([token]).texts[0]


def _short(value: float) -> float:
    """A float32 with the digits that it has."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _sampled(columns: PathColumns) -> dict[int, tuple[int, float | None, bool]]:
    """By index in the page: the sampled id, its logprob, and whether that is by the rule."""
    found: dict[int, tuple[int, float | None, bool]] = {}
    for part in columns.outputs:
        turn = part.interaction
        for at in range(max(part.start, columns.start), min(part.end, columns.end)):
            place = at - part.start
            logprob = float(turn.logprobs[place]) if turn.has_logprobs else None
            by_rule = turn.logprobs_of is LogprobsOf.RULE
            found[at - columns.start] = (turn.output_ids[place], logprob, by_rule)
    return found
