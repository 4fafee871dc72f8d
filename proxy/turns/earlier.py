"""Earlier attempts: a request that repeats one gets the running or stored choices of that attempt, without sampling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.registry import Registry
from proxy.store.replica_news import ReplicaNews
from proxy.store.turn_log import TurnLog
from proxy.telemetry.groups import TurnMetrics
from proxy.trajectory.matching import request_hash
from proxy.turns.choice import Choice
from proxy.turns.defaults import with_defaults
from proxy.turns.history import identified, with_history
from proxy.turns.replay import replay
from proxy.turns.retries import Attach, Decision, NewSample, Replay, decide, is_retry, marked
from proxy.turns.route import ExternalRoute, Routes
from proxy.turns.turn import Turn
from proxy.types import TurnRequest
from proxy.workers.attempt_table import RunsElsewhere, WorkerAttempts, digest_of
from tokengrove.errors import PreviousResponseNotFound, SessionNotFound

# How long after its commit a live replica may still be sending a reply. A reply that is not noted as written within
# this time was never sent.
WRITING_S = 2.0
# The interval at which the notes are read. A note follows its reply within about 50 ms.
_SETTLE_S = 0.02


async def settle(news: ReplicaNews, session: LiveSession, request_hash: str) -> None:
    """Wait until it is known whether the replies to equal earlier requests were sent, at most about `WRITING_S`.

    An equal request is a retry if the client never got the reply, or a new sample if it did. The replica that sends a
    reply notes in the store that it was written.
    """
    while unsettled := [a for a in session.attempts.get(request_hash, ()) if a.unsettled]:
        if not note_written(unsettled, await news.load_unreplied(session.id)):
            await asyncio.sleep(_SETTLE_S)


def note_written(attempts: Sequence[Attempt], unreplied: Collection[str]) -> bool:
    """Set `written` and `unsettled` of attempts; return True if all are settled.

    `unreplied`: ids of the interactions whose reply is not noted as written.
    """
    since = time.time() - WRITING_S
    for attempt in attempts:
        attempt.written = attempt.written or not any(i.id in unreplied for i in attempt.interactions)
        late = all((i.completed_at or 0.0) < since for i in attempt.interactions)
        attempt.unsettled = not (attempt.written or late)
    return not any(attempt.unsettled for attempt in attempts)


class EarlierAttempts:
    """Finds the attempt that a request repeats. `running`: the choices of the attempts that run in this process.

    `alone`: only this process has attempts, so those of a session in memory are all.
    """

    def __init__(
        self,
        routes: Routes,
        log: TurnLog,
        news: ReplicaNews,
        registry: Registry,
        named: NamedSessions,
        metrics: TurnMetrics,
        worker_attempts: WorkerAttempts | None,
    ) -> None:
        self._routes, self._log, self._news = routes, log, news
        self._registry, self._named, self._metrics, self._worker_attempts = registry, named, metrics, worker_attempts
        self.alone = worker_attempts is None and not registry.shared
        self._parts = asyncio.Lock()
        self.running: dict[Attempt, Sequence[Turn]] = {}

    async def repeated(self, session: LiveSession, request: TurnRequest, key: str) -> Sequence[Choice] | None:
        """The choices of the attempt in this session that the request repeats, or None if it must be sampled."""
        if session.follows is not None and not request.retry:
            session.tried.add(key)
        if self._worker_attempts is not None:
            self.check_elsewhere(session, key)
            if is_retry(request):  # it may have ended elsewhere since the session was read
                await self._registry.refresh(session)
        if self._registry.shared and is_retry(request):
            await self._wait_for_commits(session, request, key)
        if key not in session.attempts:
            return None
        if not request.retry:
            await settle(self._news, session, key)
        return await self.answering(session, request, decide(session.attempts[key], request))

    async def _wait_for_commits(self, session: LiveSession, request: TurnRequest, key: str) -> None:
        """Before a retry is sampled, wait for commits in progress to its session, which may include the attempt.

        The database may still be processing the commit of a lost connection. A session that is not stored yet is
        created first, so that this also waits for a concurrent transaction that creates it.
        """
        if isinstance(decide(session.attempts.get(key, ()), request), NewSample):
            self._named.ensure_stored(session)
            await self._log.wait_for_commits(session.id)
            await self._registry.refresh(session)

    async def of_predecessor(self, session: LiveSession, request: TurnRequest) -> Sequence[Choice] | None:
        """The choices of the attempt that the request retries in the previous, ended session of the series, or None.

        Equal requests have equal hashes in both sessions. A request that was first sent in this session is retried
        here, unless it has an Idempotency-Key, which identifies the attempt.
        """
        assert session.follows is not None
        try:
            ended = await self._registry.get(session.follows)
            repeated = with_history(ended, replace(request))
        except (SessionNotFound, PreviousResponseNotFound):
            return None
        key = request_hash(repeated, with_defaults(request, ended.record.sampling), identified(ended, repeated))
        if request.idempotency_key is None and (key in session.attempts or key in session.tried):
            return None
        self.check_elsewhere(ended, key)
        return await self.answering(ended, repeated, decide(marked(ended.attempts.get(key, ()), request), request))

    def check_elsewhere(self, session: LiveSession, key: str) -> None:
        """Raise RunsElsewhere if another worker runs an equal attempt. That worker applies the rules of `retries`."""
        if self._worker_attempts is None:
            return
        if (worker := self._worker_attempts.find(digest_of(session.id, key))) is not None:
            raise RunsElsewhere(worker)

    async def answering(
        self, session: LiveSession, request: TurnRequest, decision: Decision
    ) -> Sequence[Choice] | None:
        """Return the choices of an earlier attempt that also answers this request, or None if it must be sampled.

        Only a replay yields to the event loop.
        """
        match decision:
            case Attach(attempt):
                request.timeline.note("attached")
                self._metrics.retries.by[("attached",)] += 1
                return self.running[attempt]
            case Replay(attempt):
                request.timeline.note("replayed")
                self._metrics.retries.by[("replayed",)] += 1
                route = self._routes.of(request)
                renderer = None if isinstance(route, ExternalRoute) else route.renderer
                return [
                    await replay(renderer, session, request, attempt, interaction, self.yield_to_others)
                    for interaction in attempt.interactions
                ]
        return None

    async def yield_to_others(self) -> None:
        """Yield to the event loop. In each pass of the loop, only one of all replays does a part of its work."""
        async with self._parts:
            await asyncio.sleep(0)
