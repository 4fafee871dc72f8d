"""The mean reward of the sessions that ended last, by weight version and over time. Validation sessions are excluded.

The database is read only on request, and an answer is at most a few seconds old. A refresh reads only new and changed
sessions, a bounded number at a time. The first answers therefore include only the newest sessions, and the number of
sessions that are still unread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, TypeVar

from proxy.store.ended import Ended
from proxy.store.recordings import Recordings
from proxy.store.session_query import SessionQuery
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.routes import trained_turns
from proxy.trajectory.scored_session import scored_session
from proxy.types import Interaction, SessionRecord
from tokengrove.errors import ProxyError

MOST_SESSIONS = 2000
"""The most sessions that the means include."""
_AT_ONCE = 200
_TURNS_AT_ONCE = 4000
"""The most sessions, and the most turns, that are read at once."""
_EVERY_S = 5.0
_LATE_S = 10.0
_SHARE = 20
"""At most one in this many seconds is spent on reading."""
_WIDTHS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 24 * 3600, 7 * 24 * 3600)
_MOST_PERIODS = 60
_MOST_VERSIONS = 100

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Scored:
    """The score of a session as of `updated_at`; None if nothing rewards it."""

    updated_at: float
    ended_at: float
    version: int | None
    score: float | None


class RecentRewards:
    """Reads the scores of recently ended sessions. Use it on one event loop."""

    def __init__(self, recordings: Recordings, clock: Callable[[], float] = time.monotonic) -> None:
        self._recordings, self._clock = recordings, clock
        self._known: dict[str, _Scored] = {}
        self._reading: asyncio.Task[None] | None = None
        self._again_at = float("-inf")
        self._shown: dict[str, Any] | None = None

    async def read(self) -> dict[str, Any] | None:
        """The means as JSON; None before the first were computed.

        Waits for the database only on the first call, and if the last call was long ago, so that its means are old.
        """
        late = self._clock() >= self._again_at + _LATE_S
        if self._reading is None or (self._reading.done() and self._clock() >= self._again_at):
            self._reading = asyncio.create_task(self._refresh())
        if self._shown is None or late:
            await asyncio.shield(self._reading)
        return self._shown

    async def _refresh(self) -> None:
        begun, left = self._clock(), 0
        try:
            ended = await self._recordings.last_ended(MOST_SESSIONS)
            unknown = [each for each in ended if not self._is_known(each)]
            new = _first(unknown)
            scored = await self._score([each.session_id for each in new], {each.session_id: each for each in new})
            known = self._known | scored
            self._known = {each.session_id: known[each.session_id] for each in ended if each.session_id in known}
            left = len(unknown) - len(new)
            self._shown = _json(list(self._known.values()), left)
        except ProxyError:
            pass  # the database is unavailable, which is reported elsewhere
        finally:
            now = self._clock()
            self._again_at = now + max(0.0 if left else _EVERY_S, _SHARE * (now - begun))

    def _is_known(self, ended: Ended) -> bool:
        known = self._known.get(ended.session_id)
        return known is not None and known.updated_at == ended.updated_at

    async def _score(self, names: Sequence[str], ended: Mapping[str, Ended]) -> dict[str, _Scored]:
        if not names:
            return {}
        records = await self._recordings.find_sessions(SessionQuery(session_ids=names, limit=len(names)))
        steps = await self._recordings.load_steps(names, roots=False)
        return await asyncio.to_thread(_scored, records, steps, ended)


def _first(ended: Iterable[Ended]) -> list[Ended]:
    """The sessions to read at once, at least one."""
    found: list[Ended] = []
    turns = 0
    for each in ended:
        turns += each.turns
        if found and (len(found) >= _AT_ONCE or turns > _TURNS_AT_ONCE):
            break
        found.append(each)
    return found


def _scored(
    records: Sequence[SessionRecord], steps: Mapping[str, Sequence[Interaction]], ended: Mapping[str, Ended]
) -> dict[str, _Scored]:
    options = LayoutOptions()
    return {
        record.session_id: _Scored(
            updated_at=ended[record.session_id].updated_at,
            ended_at=record.ended_at or record.updated_at,
            version=record.weight_version,
            score=scored_session(record, trained_turns(steps[record.session_id]), options).scores.score,
        )
        for record in records
    }


def _json(scored: Sequence[_Scored], left: int) -> dict[str, Any]:
    """The means. `left`: the sessions that are still to be read."""
    rewarded = [each for each in scored if each.score is not None]
    versions = _means(rewarded, lambda each: each.version)
    newest = sorted((version for version in versions if version is not None), reverse=True)[:_MOST_VERSIONS]
    width = _width([each.ended_at for each in rewarded])
    periods = _means(rewarded, lambda each: each.ended_at // width * width)
    return {
        "sessions": len(scored),
        "unread": left,
        "rewarded": len(rewarded),
        "by_version": [{"version": version, **versions[version]} for version in sorted(newest)],
        "period_s": width,
        "over_time": [{"at": at, **periods[at]} for at in sorted(periods)],
    }


def _means(scored: Sequence[_Scored], key: Callable[[_Scored], K]) -> dict[K, dict[str, float]]:
    by_key: dict[K, list[float]] = {}
    for each in scored:
        if each.score is not None:
            by_key.setdefault(key(each), []).append(each.score)
    return {name: {"sessions": len(found), "mean": fsum(found) / len(found)} for name, found in by_key.items()}


def _width(times: Sequence[float]) -> int:
    """The length of a period in seconds, so that there are at most _MOST_PERIODS."""
    span = max(times) - min(times) if times else 0.0
    return next((width for width in _WIDTHS if span / width < _MOST_PERIODS - 1), _WIDTHS[-1])
