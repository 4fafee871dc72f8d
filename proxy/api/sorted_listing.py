"""Pages of sessions in the order of a value: all selected sessions are read for each page, and only the page is kept.

So a page is exact at its time, whatever the values are made of. The work is bounded by a number of sessions and turns;
a filter that selects more is refused, or the newest of them are sorted.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any, NamedTuple

import orjson

from proxy.api.listing import first_piece
from proxy.api.listing_request import ParsedListing
from proxy.api.session_values import SortOrder, Value
from proxy.api.summaries import Summaries, Summed
from proxy.store.recordings import SessionReads
from proxy.types import ListedSession
from tokengrove.errors import InvalidRequest

MOST_SORTED = 10_000  # sessions that the filter selects, before its conditions on turns
MOST_TURNS = 100_000  # of these sessions, if the order or the filter reads turns
PIECE = 500


class Place(NamedTuple):
    """Where a session is in an order. Places are compared only within one order."""

    missing: bool
    kind: int
    value: Any
    created_at: float
    session_id: str


@dataclass(frozen=True, slots=True)
class SortedPage:
    """A page, and the cursor of the next one. `sorted`: sessions that were put in order. `whole`: these are all."""

    sessions: list[ListedSession]
    cursor: str | None
    sorted: int
    whole: bool


class _Downwards:
    """A value that comes before smaller ones."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Downwards) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Downwards) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


class SortedListing:
    """Reads pages in the order of a value."""

    def __init__(self, recordings: SessionReads, summaries: Summaries) -> None:
        self._recordings, self._summaries = recordings, summaries

    async def page(self, wanted: ParsedListing, order: SortOrder) -> SortedPage:
        """A page of sessions. Raises InvalidRequest for a wrong cursor, and if too many sessions are selected."""
        cursor = wanted.query.after
        begin = None if cursor is None else _place_of(cursor, order)
        query = replace(wanted.query, newest=True, after=None)
        best = list[tuple[Place, ListedSession, Value]]()
        sessions, turns, found_in_all = 0, 0, 0
        reads_turns = order.reads_turns or wanted.summed.asks
        while True:
            found = await self._recordings.find_listed(replace(query, limit=PIECE + 1))
            piece = first_piece(found[:PIECE]) if reads_turns else found[:PIECE]
            more = len(piece) < len(found)
            allowed = _allowed(piece, MOST_SORTED - sessions, MOST_TURNS - turns if reads_turns else None)
            if allowed < len(piece) and not wanted.partial:
                raise _too_many(reads_turns)
            taken = piece[:allowed]
            sessions, turns = sessions + len(taken), turns + sum(each.turns for each in taken)
            fitting = await self._fitting(taken, wanted, order, reads_turns)
            found_in_all += len(fitting)
            later = (each for each in fitting if begin is None or each[0] > begin)
            best = nsmallest(wanted.limit + 1, [*best, *later], key=_place)
            if allowed < len(piece) or not more:
                break
            query = replace(query, after=piece[-1].record.session_id)
        page = best[: wanted.limit]
        end = _cursor(order, page[-1][2], page[-1][0]) if len(best) > len(page) else None
        return SortedPage([each[1] for each in page], end, found_in_all, not more and allowed == len(piece))

    async def _fitting(
        self, sessions: Sequence[ListedSession], wanted: ParsedListing, order: SortOrder, reads_turns: bool
    ) -> list[tuple[Place, ListedSession, Value]]:
        """The sessions that meet the conditions on turns, with their places and values."""
        summed: Iterable[Summed | tuple[ListedSession, None]]
        if reads_turns:
            summed = [each for each in await self._summaries.of(sessions) if wanted.summed.fits(each.summary)]
        else:
            summed = [(each, None) for each in sessions]
        valued = ((each, order.value(each, summary)) for each, summary in summed)
        return [(_place_at(order, value, each), each, value) for each, value in valued]


def _allowed(sessions: Sequence[ListedSession], most: int, most_turns: int | None) -> int:
    """How many of the first sessions may be read."""
    count = min(len(sessions), max(most, 0))
    if most_turns is None:
        return count
    for at, session in enumerate(sessions[:count]):
        most_turns -= session.turns
        if most_turns < 0:
            return at
    return count


def _too_many(reads_turns: bool) -> InvalidRequest:
    turns = f", or more than {MOST_TURNS} turns" if reads_turns else ""
    return InvalidRequest(
        f"the filter selects more than {MOST_SORTED} sessions{turns}, too many for an 'order' by a value: select "
        "fewer, for example by 'since', 'group_id' or 'metadata', or sort only the newest ones with 'partial=true'",
        param="order",
    )


def _place(entry: tuple[Place, ListedSession, Value]) -> Place:
    return entry[0]


def _place_at(order: SortOrder, value: Value, session: ListedSession) -> Place:
    return _made(order, value, session.record.created_at, session.record.session_id)


def _made(order: SortOrder, value: Value, created_at: float, session_id: str) -> Place:
    """Numbers come before texts, and texts before booleans; the other way round in a descending order."""
    if value is None:
        return Place(True, 0, 0, created_at, session_id)
    kind = 2 if isinstance(value, bool) else 1 if isinstance(value, str) else 0
    if order.descending:
        return Place(False, -kind, _Downwards(value), created_at, session_id)
    return Place(False, kind, value, created_at, session_id)


def _cursor(order: SortOrder, value: Value, place: Place) -> str:
    """The end of a page as text: the value and the session, so that it stays where it is when the session changes."""
    where = [order.name, order.key, order.descending, value, place.created_at, place.session_id]
    return base64.urlsafe_b64encode(orjson.dumps(where)).decode().rstrip("=")


def _place_of(cursor: str, order: SortOrder) -> Place:
    wrong = InvalidRequest(
        "the cursor is that of no page in this order: give the cursor of the last page", param="cursor"
    )
    try:
        where = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, orjson.JSONDecodeError, ValueError):
        raise wrong from None
    if not isinstance(where, list) or len(where) != 6 or where[:3] != [order.name, order.key, order.descending]:
        raise wrong
    value, created_at, session_id = where[3:]
    known = value is None or isinstance(value, int | float | str)
    if not known or not isinstance(created_at, float) or not isinstance(session_id, str):
        raise wrong
    return _made(order, value, created_at, session_id)
