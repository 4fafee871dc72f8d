"""Pages of sessions and groups for people who view them, read in bounded pieces.

A page may be short; its cursor then continues where the work ended. Between pieces, running turns have priority.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proxy.api.listing_request import ParsedGroups, ParsedListing
from proxy.api.summaries import Summaries, Summed
from proxy.store.recordings import SessionReads
from proxy.types import GroupSummary, ListedSession

_PIECE = 200  # the most sessions whose turns are read at once
_PIECE_TURNS = 2_000  # the most turns of them, unless a single session has more
_MOST_SESSIONS = 2_000  # the most sessions whose turns one request reads
_MOST_TURNS = 50_000
_PER_GROUP = 1_000  # the most sessions in the scores of a group, as many as a claim can lease


@dataclass(frozen=True, slots=True)
class Page:
    """Sessions with their summaries, and the cursor of the next page."""

    sessions: list[Summed]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Groups with the summaries of their first sessions, at most 1000 each, and the cursor of the next page."""

    groups: list[tuple[GroupSummary, list[Summed]]]
    cursor: str | None


class _Budget:
    """The number of sessions and turns that a request may still read."""

    def __init__(self) -> None:
        self._sessions, self._turns = _MOST_SESSIONS, _MOST_TURNS

    def spend(self, sessions: Sequence[ListedSession]) -> bool:
        """Count the sessions that were read. Return whether more may be read."""
        self._sessions -= len(sessions)
        self._turns -= sum(session.turns for session in sessions)
        return self._sessions > 0 and self._turns > 0


class Listing:
    """Reads pages. If a page has less than its limit, the rest is on the next page."""

    def __init__(self, recordings: SessionReads, summaries: Summaries) -> None:
        self._recordings, self._summaries = recordings, summaries

    async def records(self, wanted: ParsedListing) -> tuple[list[ListedSession], str | None]:
        """A page of sessions without their turns, and its cursor. Raises InvalidRequest for an unknown cursor."""
        found = await self._recordings.find_listed(replace(wanted.query, limit=wanted.limit + 1))
        page = found[: wanted.limit]
        return page, _id(page[-1]) if len(found) > len(page) else None

    async def page(self, wanted: ParsedListing) -> Page:
        """A page of sessions whose summaries meet the conditions. Raises InvalidRequest like `records`."""
        page: list[Summed] = []
        budget, query = _Budget(), wanted.query
        while True:
            # Without a condition on summaries, all sessions read are on the page.
            most = _PIECE if wanted.summed.asks else min(_PIECE, wanted.limit - len(page))
            found = await self._recordings.find_listed(replace(query, limit=most + 1))
            more = len(found) > most
            piece = first_piece(found[:most])
            for at, summed in enumerate(await self._summaries.of(piece), 1):
                if wanted.summed.fits(summed.summary):
                    page.append(summed)
                if len(page) == wanted.limit:
                    return Page(page, _id(summed.session) if more or at < len(found) else None)
            if not more and len(piece) == len(found):
                return Page(page, None)
            query = replace(query, after=_id(piece[-1]))
            if not budget.spend(piece):
                return Page(page, query.after)

    async def summed(self, sessions: Sequence[ListedSession]) -> list[Summed]:
        """The summaries of the sessions of a page, in order."""
        return [summed for piece in _pieces(sessions) for summed in await self._summaries.of(piece)]

    async def groups(self, wanted: ParsedGroups) -> GroupPage:
        """A page of groups: at least one if any exists, and fewer than the limit if they have many turns."""
        found = await self._recordings.find_groups(wanted.query, wanted.before, wanted.limit + 1)
        page: list[tuple[GroupSummary, list[Summed]]] = []
        budget = _Budget()
        for groups in _together(found[: wanted.limit]):
            ids = [group.group_id for group in groups]
            limit = _PER_GROUP if len(groups) == 1 else None
            listed = await self._recordings.find_listed(replace(wanted.query, group_ids=ids, limit=limit))
            of_group: dict[str | None, list[Summed]] = {name: [] for name in ids}
            for summed in await self.summed(listed):
                of_group[summed.session.record.group_id].append(summed)
            page += [(group, of_group[group.group_id]) for group in groups]
            if not budget.spend(listed):
                break
        return GroupPage(page, str(page[-1][0].number) if len(page) < len(found) else None)


def _together(groups: Sequence[GroupSummary]) -> Iterator[list[GroupSummary]]:
    """The groups in order, batched so that one query reads the sessions of a batch: at most a piece."""
    some, sessions = list[GroupSummary](), 0
    for group in groups:
        count = sum(group.by_status.values())
        if some and sessions + count > _PIECE:
            yield some
            some, sessions = [], 0
        some.append(group)
        sessions += count
    if some:
        yield some


def _id(session: ListedSession) -> str:
    return session.record.session_id


def first_piece(sessions: Sequence[ListedSession]) -> Sequence[ListedSession]:
    """The first sessions, to read at once: at least one, and at most the turns of a piece."""
    turns = 0
    for at, session in enumerate(sessions[:_PIECE]):
        turns += session.turns
        if turns > _PIECE_TURNS and at:
            return sessions[:at]
    return sessions[:_PIECE]


def _pieces(sessions: Sequence[ListedSession]) -> Iterator[Sequence[ListedSession]]:
    while sessions:
        piece = first_piece(sessions)
        yield piece
        sessions = sessions[len(piece) :]
