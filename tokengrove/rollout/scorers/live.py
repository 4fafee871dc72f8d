"""Scores sessions while they go on.

A turn is scored once it is complete, or once it was followed if the scorer reads the next messages; a trajectory once
its session has ended. Nothing is kept but the rewards themselves: after a restart, what has no reward is scored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from tokengrove.client import AsyncClient, ServerUnreachable
from tokengrove.client.options import SessionFilter
from tokengrove.errors import InvalidRequest, StoreUnavailable, TooManyRequests
from tokengrove.rollout.scorers.scored import Scored
from tokengrove.rollout.scorers.scorer import Scorer
from tokengrove.rollout.scorers.scoring import unscored
from tokengrove.rollout.scorers.sessions import Tasks, loaded, score_session
from tokengrove.rollout.trajectory import Turn

logger = logging.getLogger(__name__)

_SINCE_S = 86_400.0
_CONNECT_AGAIN_S = 2.0
_FIRST_S, _LONGEST_S = 2.0, 300.0
# The ids that one list may be asked for.
_LISTED = 1000


def pause_after(failures: int) -> float:
    """Seconds until a session is scored again, after this many failures in a row."""
    return float(min(_FIRST_S * 2.0 ** min(failures - 1, 30), _LONGEST_S))


async def score_live(
    client: AsyncClient,
    scorers: Sequence[Scorer | Callable[..., Any] | str],
    filter: SessionFilter | None = None,
    *,
    tasks: Tasks = None,
    concurrency: int = 16,
    timeout_s: float | None = 600.0,
    pause_s: Callable[[int], float] = pause_after,
) -> AsyncGenerator[Scored]:
    """Score sessions as they change, and yield the scores and failures of each, until the iterator is closed.

    `filter`: which sessions; None: live ones, and those that ended in the last 24 hours. `tasks`, `concurrency` and
    `timeout_s`: as in `score_sessions`. What failed is scored again after a pause; `pause_s` returns its seconds, given
    the number of failures of the session in a row (by default 2, 4, 8 ... up to 300). While the server is away, it
    waits. Changes through another server of the same database are seen when the connection is made again.

    Raises InvalidRequest for invalid scorers, ServerUnreachable if the first attempt to connect fails, and the server's
    error if it refuses the key or the filter.
    """
    if concurrency < 1:
        raise InvalidRequest("'concurrency' must be at least 1", param="concurrency")
    live = _Live(client, loaded(scorers), filter, tasks, asyncio.Semaphore(concurrency), timeout_s, pause_s)
    try:
        async for scored in live.results():
            yield scored
    finally:
        await live.close()


class _Live:
    """The sessions that are being scored, each by one task at a time."""

    def __init__(
        self,
        client: AsyncClient,
        scorers: Sequence[Scorer],
        filter: SessionFilter | None,
        tasks: Tasks,
        room: asyncio.Semaphore,
        timeout_s: float | None,
        pause_s: Callable[[int], float],
    ) -> None:
        self._client, self._scorers, self._filter, self._tasks = client, scorers, filter, tasks
        self._room, self._timeout_s, self._pause_s = room, timeout_s, pause_s
        self._found: asyncio.Queue[Scored | BaseException] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        # Sessions to score, and whether each has ended.
        self._due: dict[str, bool] = {}
        # Calls that returned no score, which the database does not show, of all sessions that are not over.
        self._without: dict[str, set[tuple[str, str | None]]] = {}
        self._listening = self._started(self._listen())

    async def results(self) -> AsyncGenerator[Scored]:
        """Yield what has scores or failures. Raises what ended the listening."""
        while True:
            found = await self._found.get()
            if isinstance(found, BaseException):
                raise found
            if found.scores or found.failures:
                yield found

    async def close(self) -> None:
        """Cancel all calls that run."""
        running = [self._listening, *self._running.values()]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def tell(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._found.put_nowait(error)

        task = asyncio.create_task(work)
        task.add_done_callback(tell)
        return task

    async def _listen(self) -> None:
        connected = False
        while True:
            try:
                read = False
                async for event in self._client.events():
                    if not read:  # the stream tells of no earlier change
                        await self._look(None)
                        connected = read = True
                    elif event.kind == "sessions":
                        await self._look(None if event.data["all"] else event.data["changed"])
            except (ServerUnreachable, StoreUnavailable, TooManyRequests) as error:
                if not connected:
                    raise
                logger.warning("scoring waits for the server: %(why)s", {"why": error.message})
            await asyncio.sleep(_CONNECT_AGAIN_S)

    async def _look(self, changed: Sequence[str] | None) -> None:
        """Score the sessions of these ids that the filter selects, and forget the others; None: all of the filter."""
        names = None if changed is None or len(changed) > _LISTED else list(changed)
        chosen: Any = {"since": time.time() - _SINCE_S} if self._filter is None else self._filter
        asked: Any = chosen if names is None else {**chosen, "session_ids": names}
        listed = await self._client.sessions(asked)
        ended = {each["session_id"]: each["status"] != "active" for each in listed}
        for name in self._without.keys() - ended.keys() if names is None else set(names) - ended.keys():
            self._without.pop(name, None)
        self._due |= ended
        for name in ended:  # in the order of the list
            if name not in self._running:
                self._running[name] = self._started(self._follow(name))

    async def _follow(self, name: str) -> None:
        """Score a session until it has not changed meanwhile and no call failed, or it was deleted."""
        failures = 0
        try:
            while name in self._due:
                ended = self._due.pop(name)
                scored = await self._score(name, ended)
                self._found.put_nowait(scored)
                failures = failures + 1 if scored.failures else 0
                if failures:
                    await asyncio.sleep(self._pause_s(failures))
                    if name in self._without:
                        self._due.setdefault(name, ended)
        finally:
            del self._running[name]

    async def _score(self, name: str, ended: bool) -> Scored:
        without = self._without.setdefault(name, set())

        def wanted(scorer: Scorer, turn: Turn) -> bool:
            return unscored(scorer, turn) and (scorer.name, turn.interaction_id) not in without

        scorers = [each for each in self._scorers if ended or each.per == "turn"]
        async with self._room:
            scored = await score_session(self._client, name, scorers, self._tasks, self._timeout_s, wanted)
        without.update(scored.without)
        if ended and not scored.failures:
            self._without.pop(name, None)
        return scored
