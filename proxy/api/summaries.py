"""Summaries of sessions, cached until their sessions change.

A live session is summarised again when it is viewed after a new turn; an ended session is summarised once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from proxy.api.pace import Pace
from proxy.store.recordings import SessionReads
from proxy.trajectory.summary import Summary, summarise
from proxy.types import ListedSession, Outline

_KEPT = 20_000  # the most recently viewed sessions, about 1 kB each


class Summed(NamedTuple):
    """A session and the summary of its turns."""

    session: ListedSession
    summary: Summary


class _State(NamedTuple):
    """The session state of a summary. A session that was deleted and started again has another time."""

    created_at: float
    turns: int
    revision: int


class Summaries:
    """Makes summaries in a thread, and caches the latest ones."""

    def __init__(self, recordings: SessionReads, pace: Pace) -> None:
        self._recordings, self._pace = recordings, pace
        self._kept: OrderedDict[str, tuple[_State, Summary]] = OrderedDict()

    async def of(self, sessions: Sequence[ListedSession]) -> list[Summed]:
        """The summaries of at most 10,000 sessions, in order. The ones that are not cached are one slice of work."""
        known = {each.record.session_id: found for each in sessions if (found := self._find(each)) is not None}
        new = [each for each in sessions if each.record.session_id not in known]
        if new:
            known |= await self._pace.work(self._make(new))
        return [Summed(each, known[each.record.session_id]) for each in sessions]

    def _find(self, session: ListedSession) -> Summary | None:
        state, summary = self._kept.get(session.record.session_id, (None, None))
        if state != _state(session):
            return None
        self._kept.move_to_end(session.record.session_id)
        return summary

    async def _make(self, sessions: Sequence[ListedSession]) -> Mapping[str, Summary]:
        outlines = await self._recordings.load_outlines([each.record.session_id for each in sessions])
        made = await asyncio.to_thread(_summarised, sessions, outlines)
        for each in sessions:
            name = each.record.session_id
            # The outline may have later turns than the listed session; it is then not the summary of its state.
            if len(outlines[name].steps) == each.turns:
                self._kept[name] = _state(each), made[name]
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return made


def _state(session: ListedSession) -> _State:
    return _State(session.record.created_at, session.turns, session.revision)


def _summarised(sessions: Sequence[ListedSession], outlines: Mapping[str, Outline]) -> dict[str, Summary]:
    return {each.record.session_id: summarise(each.record, outlines[each.record.session_id]) for each in sessions}
