"""The life of a turn, the same for all APIs.

1 parse the request (protocols)        2 find its session (sessions)            3 resolve named history (history)
4 attach or replay a retry (retries)   5 find parent, build prompt (prompts)    6 apply the budgets (budgets)
7 sample and parse tokens (turn)       8 prove alignment and commit (commits)   9 only now send the end to the client

A generation that fails or is cancelled is stored with that status and its sampled tokens; it is never partly complete.
Cancellation at any point frees the request in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from proxy.images.image_pool import ImagePool
from proxy.protocols.hosted_tools import check_hosted
from proxy.resources.places import Places
from proxy.resources.turnstile import Turnstile
from proxy.sessions.attempts import Attempt, Stage
from proxy.sessions.episodes import EpisodeOver
from proxy.sessions.live_session import LiveSession
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.registry import Registry
from proxy.sessions.replica import merge_stored
from proxy.settings import Settings
from proxy.store.replica_news import ReplicaNews
from proxy.store.turn_log import TurnLog
from proxy.telemetry.groups import TurnMetrics
from proxy.trajectory.matching import request_hash
from proxy.turns.choice import Choice
from proxy.turns.commits import Commits
from proxy.turns.defaults import check_capabilities, follow_session, leave_out_effort, with_defaults
from proxy.turns.earlier import EarlierAttempts
from proxy.turns.history import with_history
from proxy.turns.plan import ReplyPlan, make_turns
from proxy.turns.planner import Planner, ids_of_text
from proxy.turns.prompts import Prompt
from proxy.turns.retries import FIRST, NewSample, decide, is_retry
from proxy.turns.route import EngineRoute, Routes
from proxy.turns.running import RunningTurns
from proxy.turns.turn import Turn
from proxy.types import Api, Interaction, TurnRequest
from proxy.workers.attempt_table import WorkerAttempts, digest_of
from tokengrove.errors import (
    SHUTTING_DOWN,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    ProxyError,
    StoreUnavailable,
    brief,
)
from tokengrove.options.session import Purpose
from tokengrove.reasons import FinishReason, Status

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The generation of a client that disconnects continues for this many seconds, so that a retry can attach. Agents on
# other machines lose streams to their network, and come back after the wait of their SDK.
GRACE_S, FAR_GRACE_S = 2.0, 30.0
_GRACE = "grace"
_interaction_of = attrgetter("interaction")

# Errors of a cancelled turn: two for its record, and one for its readers.
_SHUT_DOWN = "cancelled: the server shut down"
_DISCONNECTED = "cancelled: the client disconnected"
_WITHDRAWN = "cancelled: the session was withdrawn"
_RETRY = "this reply was cancelled because its client disconnected; send the request again"


class Turns:
    """Starts turns on the engine of their route, and ends their attempts.

    `running`: the turns that run. `earlier`: the attempts that a request may repeat. `absence`: outages of the
    database, during which a turn waits before it starts. `log_content`: log lines may have text of messages.
    """

    def __init__(
        self,
        *,
        routes: Routes,
        log: TurnLog,
        news: ReplicaNews,
        registry: Registry,
        named: NamedSessions,
        settings: Settings,
        metrics: TurnMetrics,
        places: Places,
        turnstile: Turnstile,
        images: ImagePool,
        worker_attempts: WorkerAttempts | None = None,
    ) -> None:
        """`routes`: what serves requests. `places`: the limit on running choices. `turnstile`: the queue of starting
        choices. `images`: the images of earlier turns. `worker_attempts`: this worker's entries in the table of all
        workers; None if it is the only one."""
        self.running = RunningTurns(places, settings, metrics, worker_attempts)
        self.earlier = EarlierAttempts(routes, log, news, registry, named, metrics, worker_attempts)
        self._planner, self._turnstile = Planner(settings, images, self.running), turnstile
        self.routes, self._worker_attempts = routes, worker_attempts
        self._log, self.absence = log, log.absence
        self._named = named
        self._settings = settings
        self.log_content = settings.log_content
        self._metrics = metrics
        self._unreplaced: set[str] = set()
        self._draining = False
        self._background: set[asyncio.Task[None]] = set()
        self._commits = Commits(log, registry, metrics, images, places, self._in_background)

    @property
    def _grace_s(self) -> float:
        if self._settings.reconnect_s is not None:
            return self._settings.reconnect_s
        return GRACE_S if self._settings.agent_address is None else FAR_GRACE_S

    @property
    def finished(self) -> int:
        """The number of turns completed so far."""
        return sum(count for (_, status), count in self._metrics.ended.by.items() if status is Status.COMPLETE)

    @property
    def blocked(self) -> bool:
        """True while new turns wait before they start: the engine is paused, or none of its servers is alive."""
        return self.routes.main.gate.closed

    async def begin(self, session: LiveSession, request: TurnRequest, *, new_id: Callable[[], str]) -> Sequence[Choice]:
        """Return the `n` choices of a reply: newly started turns, or those of an earlier attempt for a retry.

        New turns have their parent, prompt and budgets, and are sampling. Raises InvalidRequest and its subclasses,
        SessionClosed, LimitReached, TooManyRequests, StoreUnavailable and EngineUnavailable, all before anything is
        sampled; RunsElsewhere if another worker must decide.
        """
        request.timeline.begun = time.monotonic()
        session.check_open()
        record = session.record
        if request.template_options and (reader := self.routes.reader(request.route)) is not None:
            leave_out_effort(request, reader.renderer)
        if record.turn_options:
            follow_session(request, record)
        if request.dropped:
            check_hosted(request.dropped, self._settings.hosted_tools)
        route = self.routes.of(request)
        if request.text is not None:
            ids = await ids_of_text(session, request.text, request.sender, self.routes.engine(request.route))
            request = replace(request, input_ids=ids, text=None)
        if session.follows is not None and is_retry(request):
            earlier = await self.earlier.of_predecessor(session, request)
            if earlier is not None:
                return earlier
        wanted = with_defaults(request, record.sampling) if record.sampling else request.sampling
        if isinstance(route, EngineRoute):
            check_capabilities(request, wanted, route.gate.info(), strict=self._settings.strict_sampling)
        if request.api is Api.RESPONSES:
            request = with_history(session, request)
        request.messages, identity = session.cache.recent.identify(
            request.messages, request.tools, request.template_options, request.route
        )
        key = request_hash(request, wanted, identity)
        if not self.earlier.alone or session.follows is not None or key in session.attempts:
            earlier = await self.earlier.repeated(session, request, key)
            if earlier is not None:
                return earlier
        self._commits.check_backlog()
        self.running.check_room(request)
        if isinstance(route, EngineRoute):
            plan = await self._planner.of_engine(session, request, identity, wanted, route)
        else:
            plan = self._planner.of_external(session, request, identity, wanted, route)
        plan.attempt = Attempt(key, request.idempotency_key)
        request = plan.request
        request.timeline.rendered = time.monotonic()
        if logger.isEnabledFor(logging.DEBUG):
            _log_prompt(session, request, plan.prompt)
        # Other turns may have started while this prompt was rendered, so the checks are repeated. No other task runs
        # between here and the start.
        session.check_open()
        decision = decide(session.attempts[key], request) if key in session.attempts else FIRST
        if not isinstance(decision, NewSample):
            earlier = await self.earlier.answering(session, request, decision)
            if earlier is not None:
                return earlier
        if self._worker_attempts is not None:
            self.earlier.check_elsewhere(session, key)
        self.running.check_room(request)
        if self.routes.of(request) is not route:  # it was removed meanwhile, and another may have its name
            raise ModelNotFound(f"the model {brief(request.model)} was removed meanwhile", param="model")
        plan.reply_id = new_id()
        if isinstance(route, EngineRoute):
            plan.adapter = route.begin(session, request.pinned)
        try:
            choices = make_turns(plan)
            if record.turn_options and session.episodes is not None:
                self._check_episode(session, choices)
        except BaseException:
            plan.release()
            raise
        if isinstance(decision, NewSample):
            for failed in decision.superseded:
                self._supersede(session, failed)
        self._start(plan, choices)
        return choices

    def _check_episode(self, session: LiveSession, choices: Sequence[Turn]) -> None:
        """Raise EpisodeOver if the turns are too many for the session, or begin a conversation at which it is cut.

        The turns of one request are in one session, even if they alone are too many.
        """
        assert session.episodes is not None
        turn, most = choices[0], session.episodes.max_turns
        taken, more = session.turns_taken, len(choices) * (1 + len(turn.request.further_prompts))
        if most is not None and taken and taken + more > most and not turn.request.prompt_number:
            raise EpisodeOver(session.id, f"{most} turns")
        cuts, interaction = session.episodes.lineage, turn.interaction
        if not cuts or not session.cache.nodes or turn.request.input_ids is not None:
            return
        kind = self._commits.begun(turn)
        if kind in cuts and interaction.purpose in (None, Purpose.MAIN):
            raise EpisodeOver(session.id, f"a conversation began ({kind})")

    def leave(self, attempt: Attempt) -> None:
        """Detach a reader. A running attempt without readers is cancelled after `--reconnect-s`."""
        if attempt.leave():
            attempt.grace = self._in_background(self._end_deserted(attempt), _GRACE)

    def replied(self, attempt: Attempt) -> None:
        """Record that the end of a reply was written to a client. From then on, an unmarked repetition is sampled."""
        if not attempt.written:
            attempt.written = True
            for interaction in attempt.interactions:  # none yet if the attempt ends in the next pass of the event loop
                self._log.note_replied(interaction.id)

    def _note_replied(self, attempt: Attempt) -> None:
        for interaction in attempt.interactions:
            self._log.note_replied(interaction.id)

    async def drain(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds for running turns, then cancel the rest and record what they sampled.

        Returns how many were cancelled.
        """
        self._draining = True
        for route in self.routes.engines.values():
            route.gate.send_away()
        cancelled = await self.running.drain(timeout_s)
        for task in self._background:
            if task.get_name() == _GRACE:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._commits.record_rest()
        return cancelled

    def _start(self, plan: ReplyPlan, choices: Sequence[Turn]) -> None:
        session, attempt = plan.session, plan.attempt
        self._named.ensure_stored(session)
        session.attempts.setdefault(attempt.key, []).append(attempt)
        self.earlier.running[attempt] = choices
        if self._worker_attempts is not None:
            self._worker_attempts.add(digest_of(session.id, attempt.key), len(choices))
        left, loop = len(choices), asyncio.get_running_loop()

        def ended(turn: Turn, _: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._attempt_ended(session, attempt)
                if plan.adapter is not None:
                    plan.release()
            self._ended(turn)

        for turn in choices:
            session.begin_turn(turn.interaction.id)
            self._log.note_begun(turn.interaction.id, session.id, attempt.key, attempt.idempotency_key)
            self.running.add(turn)
            turn.ended = loop.create_task(self._run(turn))
            turn.ended.add_done_callback(partial(ended, turn))

    def _attempt_ended(self, session: LiveSession, attempt: Attempt) -> None:
        """End an attempt: all its choices have ended and are recorded."""
        choices = self.earlier.running.pop(attempt)
        attempt.end(list(map(_interaction_of, choices)))
        if attempt.stage is Stage.FAILED:
            merge_stored(session, attempt)
        elif self._unreplaced:  # the database takes turns
            for interaction_id in self._unreplaced:
                self._in_background(self._replace(interaction_id))
            self._unreplaced = set()
        if attempt.written:
            self._note_replied(attempt)
        if self._worker_attempts is not None:
            self._worker_attempts.remove(digest_of(session.id, attempt.key), len(choices))
        if attempt.superseded:
            attempt.superseded = False
            self._supersede(session, attempt)

    def _supersede(self, session: LiveSession, attempt: Attempt) -> None:
        """Replace a failed attempt with a newer one. An attempt that is still ending is replaced once it has failed."""
        attempt.superseded = True
        if attempt.stage is Stage.FAILED:
            session.attempts[attempt.key].remove(attempt)
            for interaction_id in attempt.failures():
                self._in_background(self._replace(interaction_id))

    async def _replace(self, interaction_id: str) -> None:
        """Record that a failed turn was replaced. If the database is down, this is done once it takes turns again."""
        try:
            await self._log.supersede(interaction_id)
        except StoreUnavailable:
            self._unreplaced.add(interaction_id)

    def _ended(self, turn: Turn) -> None:
        turn.timeline.ended = time.monotonic()
        turn.session.end_turn(complete=turn.interaction.status is Status.COMPLETE)
        self.running.discard(turn)
        if not turn.ended.cancelled():
            # Retrieve the exception: otherwise asyncio warns about a failed turn without a reader.
            turn.ended.exception()

    async def _run(self, turn: Turn) -> Interaction:
        sender, turn.begun = turn.request.sender, True
        try:
            if turn.unwanted:
                raise asyncio.CancelledError
            if turn.index:  # the first choice has entered with its request
                await self._turnstile.enter(sender)
            await self.running.place(sender)
            turn.placed, finish = True, FinishReason.LENGTH
            if turn.generate.sampling.max_tokens != 0:
                finish = await turn.sample(turn)
            turn.timeline.sampled = time.monotonic()
            return await self._commits.complete(turn, finish)
        except ProxyError as error:
            error.__traceback__ = None  # the turn keeps the error, and its frames have chunks with side columns
            if isinstance(error, InvalidRequest):
                _name_field(error, turn)
            await self._commits.record_failure(turn, Status.FAILED, error.message)
            raise
        except asyncio.CancelledError as error:
            error.__traceback__ = None
            stopped, withdrawn = self._draining, turn.session.record.withdrawn
            told = _SHUT_DOWN if stopped else _WITHDRAWN if withdrawn else _DISCONNECTED
            await self._commits.record_failure(turn, Status.ABORTED, told)
            if turn.session.deleted or withdrawn:
                turn.session.check_open()
            raise EngineUnavailable(SHUTTING_DOWN if stopped else _RETRY) from None
        except Exception as error:
            logger.exception(
                "turn %(interaction)s failed",
                {"interaction": turn.interaction.id, "session": turn.session.id, **turn.session.labels},
            )
            error.__traceback__ = None
            await self._commits.record_failure(turn, Status.FAILED, f"{type(error).__name__}: {error}")
            raise EngineFailed("the engine or the server failed in this turn; see the server's log") from error
        finally:
            if turn.placed:
                self.running.leave(sender)
            if turn.order is not None:
                turn.order.end(turn.index)

    async def _end_deserted(self, attempt: Attempt) -> None:
        """Cancel the turns of an attempt without readers after the grace period, except those being committed."""
        await asyncio.sleep(self._grace_s)
        attempt.grace = None
        for turn in self.earlier.running[attempt]:
            if not turn.committing:
                attempt.stage = Stage.ENDING
                turn.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _name_field(error: InvalidRequest, turn: Turn) -> None:
    """Name the field that demands a grammar: an engine refuses one that it cannot compile, without its name."""
    grammar = turn.generate.grammar
    if grammar is not None and error.param is None and error.shown is not None:
        error.param = grammar.param
        error.shown = f"{error.shown}, perhaps because of '{grammar.param}'"


def _log_prompt(session: LiveSession, request: TurnRequest, prompt: Prompt) -> None:
    parent = prompt.match.parent
    logger.debug(
        "prompt",
        {
            "session": session.id,
            **session.labels,
            "api": request.api.value,
            "parent": None if parent is None else parent.interaction.id,
            "bridged": prompt.bridged,
            "prompt_tokens": len(prompt.ids),
            "messages": len(request.messages),
            "matched_messages": prompt.match.covered,
        },
    )
