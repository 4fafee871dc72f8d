"""Summaries of sessions, kept for as long as their sessions do not change.

A live session is summed up again when somebody looks after a turn of it; one that has ended once.
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

_KEPT = 20_000  # of the sessions looked at last, about 1 kB each


class Summed(NamedTuple):
    """A session and what its turns come to."""

    session: ListedSession
    summary: Summary


class _State(NamedTuple):
    """What a summary was made of. A session that was deleted and started again has another time."""

    created_at: float
    turns: int
    revision: int


class Summaries:
    """Makes summaries in a thread, and keeps the latest ones."""

    def __init__(self, recordings: SessionReads, pace: Pace) -> None:
        self._recordings, self._pace = recordings, pace
        self._kept: OrderedDict[str, tuple[_State, Summary]] = OrderedDict()

    async def of(self, sessions: Sequence[ListedSession]) -> list[Summed]:
        """The summaries of at most 10,000 sessions, in their order. Those that are not kept are one slice of work."""
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
            # Turns that came in between are in the outline: its state is not that of the session as it was listed.
            if len(outlines[name].steps) == each.turns:
                self._kept[name] = _state(each), made[name]
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return made


def _state(session: ListedSession) -> _State:
    return _State(session.record.created_at, session.turns, session.revision)


def _summarised(sessions: Sequence[ListedSession], outlines: Mapping[str, Outline]) -> dict[str, Summary]:
    return {each.record.session_id: summarise(each.record, outlines[each.record.session_id]) for each in sessions}
