"""The life of a turn, the same for all APIs.

1 parse the request (protocols)        2 find its session (sessions)            3 resolve named history (history)
4 attach or replay a retry (retries)   5 find parent, build prompt (prompts)    6 apply the budgets (budgets)
7 sample and parse tokens (turn)       8 prove alignment and commit (commits)   9 only now send the end to the client

A generation that fails or is cancelled is stored with that status and the tokens that it sampled; it is never partly
complete. Cancellation at any point frees the request in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from proxy.engine.gate import Gate
from proxy.engine.interface import EngineInfo
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.rendering.renderer import Renderer
from proxy.rendering.token_bound import TooManyTokens
from proxy.resources.fair_pool import FairPool
from proxy.resources.places import Places
from proxy.resources.senders import Sender
from proxy.resources.turnstile import Turnstile
from proxy.sessions.attempts import Attempt, Stage
from proxy.sessions.live_session import LiveSession
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.registry import Registry
from proxy.sessions.replica import merge_stored
from proxy.sessions.scores import Scores
from proxy.sessions.settling import settle
from proxy.settings import Settings
from proxy.store.replica_news import ReplicaNews
from proxy.store.turn_log import TurnLog
from proxy.telemetry.timeline import Timeline
from proxy.telemetry.turn_metrics import TurnMetrics
from proxy.trajectory.matching import Identity, request_hash
from proxy.turns.budgets import apply_budgets, check_images, context_of, most_counted, most_in_prompt
from proxy.turns.choice import Choice
from proxy.turns.commits import Commits
from proxy.turns.defaults import best_effort, check_capabilities, with_defaults
from proxy.turns.history import with_history, with_messages
from proxy.turns.plan import ReplyPlan, make_turns
from proxy.turns.prompts import Prompt, Prompts
from proxy.turns.replay import replay
from proxy.turns.retries import Attach, Decision, NewSample, Replay, decide, marked
from proxy.turns.session_options import follow_session
from proxy.turns.turn import Turn
from proxy.types import Continued, Ids, Interaction, Message, Parsing, PromptText, TurnRequest
from proxy.workers.seats import RunsElsewhere, Seat, digest_of
from tokengrove.errors import (
    SHUTTING_DOWN,
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    PreviousResponseNotFound,
    ProxyError,
    SessionNotFound,
    StoreUnavailable,
    TooManyRequests,
)
from tokengrove.reasons import FinishReason, Status

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A client that disconnects may retry soon: its generation continues for this long, so that the retry can attach.
GRACE_S = 2.0
_GRACE = "grace"

# A cancelled turn: the error in its record, and the error that its readers get.
_SHUT_DOWN = "cancelled: the server shut down"
_DISCONNECTED = "cancelled: the client disconnected"
_WITHDRAWN = "cancelled: the session was withdrawn"
_RETRY = "this reply was cancelled because its client disconnected; send the request again"


class Turns:
    """Starts turns on one engine, and keeps those that are running, by attempt.

    `absence`: whether the database is away: a turn then waits before it starts.
    `log_content`: whether their lines may have text of messages. `sees`: the model takes images.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        renderer: Renderer,
        log: TurnLog,
        news: ReplicaNews,
        registry: Registry,
        named: NamedSessions,
        scores: Scores,
        settings: Settings,
        metrics: TurnMetrics,
        pool: FairPool,
        places: Places,
        turnstile: Turnstile,
        images: ImagePool,
        seat: Seat | None = None,
    ) -> None:
        """`places`: of the choices that run. `turnstile`: of those that begin. `images`: those of earlier turns.
        `seat`: this worker's entries among those of the other workers; None without any."""
        self._images = images
        self._places, self._turnstile = places, turnstile
        self._gate = gate
        self._registry, self._seat = registry, seat
        self._renderer, self.sees = renderer, renderer.sees
        self._log, self.absence = log, log.absence
        self._news = news
        self._named = named
        self._settings = settings
        self.log_content = settings.log_content
        self._metrics = metrics
        self._prompts = Prompts(renderer, pool)
        self._running: set[Turn] = set()
        metrics.in_flight.watch(self._running.__len__)
        self._choices: dict[Attempt, Sequence[Turn]] = {}
        self._unrecorded: set[asyncio.Task[Any]] = set()
        self._unreplaced: set[str] = set()
        self._arriving = 0
        self._draining = False
        self._background: set[asyncio.Task[None]] = set()
        self._parts = asyncio.Lock()
        self._commits = Commits(log, registry, scores, metrics, images, places, self._in_background)

    @property
    def busy(self) -> bool:
        """True while at least one turn is running or about to start."""
        return bool(self._running or self._unrecorded or self._arriving)

    @property
    def running(self) -> int:
        """The number of turns that run."""
        return len(self._running) + len(self._unrecorded)

    @property
    def finished(self) -> int:
        """The number of turns that were completed so far."""
        return sum(count for (_, status), count in self._metrics.ended.by.items() if status is Status.COMPLETE)

    @property
    def held_up(self) -> bool:
        """True while the engine is paused or no server of it is alive: a new turn waits before it starts."""
        return self._gate.closed

    async def begin(self, session: LiveSession, request: TurnRequest, *, new_id: Callable[[], str]) -> Sequence[Choice]:
        """Return the `n` choices of a reply: newly started turns, or those of an earlier attempt for a retry.

        New turns have their parent, prompt and budgets settled, and are sampling. Raises InvalidRequest and its
        subclasses, SessionClosed, LimitReached, TooManyRequests, StoreUnavailable and EngineUnavailable, all before
        anything is sampled; RunsElsewhere if another worker must decide.
        """
        request.timeline.begun = time.monotonic()
        session.check_open()
        follow_session(request, session.record)
        if request.text is not None:
            request = replace(request, input_ids=await self._ids_of(session, request.text, request.sender), text=None)
        if _is_retry(request) and session.follows is not None:
            earlier = await self._of_predecessor(session, request)
            if earlier is not None:
                return earlier
        info = self._gate.info()
        wanted = with_defaults(request, session.record.sampling)
        check_capabilities(request, wanted, info, strict=self._settings.strict_sampling)
        request = with_history(session, request)
        identity = _identify(session, request)
        key = request_hash(request, wanted, identity)
        if (earlier := await self._repeated(session, request, key)) is not None:
            return earlier
        self._commits.check_backlog()
        self._check_room(request)
        if self._gate.closed:
            await self._arrive(session, request.timeline)
        try:
            prompt = await self._prompt(session, request, identity, info)
        except ContextLengthExceeded:
            session.cache.recent.forget(request.messages)  # they may be megabytes
            raise
        if prompt.messages is not request.messages:
            request = with_messages(request, prompt.messages)
        self._prompts.check_vocabulary(prompt.ids, info.vocab_size, request)
        sampling = apply_budgets(wanted, request.n, session, len(prompt.ids), self._settings, info.context_length)
        if prompt.images:
            check_images(session, prompt.images, request.files, self._settings)
        grammar = self._prompts.grammar(request)
        request.timeline.rendered = time.monotonic()
        if logger.isEnabledFor(logging.DEBUG):
            _log_prompt(session, request, prompt)
        # Other turns may have started while this prompt was rendered, so the checks are made again. Nothing else runs
        # from here to the start.
        session.check_open()
        decision = decide(session.attempts.get(key, ()), request)
        if (earlier := await self._earlier(session, request, decision)) is not None:
            return earlier
        if self._seat is not None:
            self._check_elsewhere(session, key)
        self._check_room(request)
        plan = ReplyPlan(
            session=session,
            request=request,
            prompt=prompt,
            sampling=sampling,
            grammar=grammar,
            best_effort=best_effort(wanted, info),
            attempt=Attempt(key, request.idempotency_key),
            reply_id=new_id(),
            pool=self._images,
        )
        choices = make_turns(plan, self._renderer)
        if isinstance(decision, NewSample):
            for failed in decision.superseded:
                self._supersede(session, failed)
        self._start(plan, choices)
        return choices

    async def _repeated(self, session: LiveSession, request: TurnRequest, key: str) -> Sequence[Choice] | None:
        """The choices of an earlier attempt of this session that the request repeats, None if it asks for new ones."""
        if session.follows is not None and not request.retry:
            session.tried.add(key)
        if self._seat is not None:
            self._check_elsewhere(session, key)
            if _is_retry(request):  # it may have ended elsewhere since the session was read
                await self._registry.refresh(session)
        if self._registry.shared and _is_retry(request):
            await self._outlast_commits(session, request, key)
        if key not in session.attempts:
            return None
        if not request.retry:
            await settle(self._news, session, key)
        return await self._earlier(session, request, decide(session.attempts[key], request))

    async def _outlast_commits(self, session: LiveSession, request: TurnRequest, key: str) -> None:
        """Before a retry is sampled, wait for what is being committed to its session, perhaps its earlier attempt.

        The database may still be at the commit of a connection that was lost. A session that it does not have yet is
        created, so that this waits for whoever does the same.
        """
        if isinstance(decide(session.attempts.get(key, ()), request), NewSample):
            self._named.ensure_stored(session)
            await self._log.outlast(session.id)
            await self._registry.refresh(session)

    async def _of_predecessor(self, session: LiveSession, request: TurnRequest) -> Sequence[Choice] | None:
        """The choices of an attempt of the ended session before this one in its series, if the request is its retry.

        Equal requests have equal hashes in both. What was tried here first is retried here, unless its Idempotency-Key
        says where it was.
        """
        assert session.follows is not None
        try:
            ended = await self._registry.get(session.follows)
            repeated = with_history(ended, replace(request))
        except (SessionNotFound, PreviousResponseNotFound):
            return None
        key = request_hash(repeated, with_defaults(request, ended.record.sampling), _identify(ended, repeated))
        if request.idempotency_key is None and (key in session.attempts or key in session.tried):
            return None
        if self._seat is not None:
            self._check_elsewhere(ended, key)
        return await self._earlier(ended, repeated, decide(marked(ended.attempts.get(key, ()), request), request))

    async def _prompt(self, session: LiveSession, request: TurnRequest, identity: Identity, info: EngineInfo) -> Prompt:
        """Return the prompt of a turn.

        A history that has a token outside of the vocabulary, of a broken engine or another model, is rendered anew.
        """
        context = context_of(session, self._settings, info.context_length)
        most = most_in_prompt(session, context)
        try:
            if request.input_ids is not None:
                if len(request.input_ids) > most:
                    raise ContextLengthExceeded(prompt_tokens=len(request.input_ids), context_tokens=context)
                return await self._prompts.given(session, request, request.input_ids)
            prompt = await self._prompts.build(session, request, identity, most)
            if prompt.bridged and prompt.ids.largest >= info.vocab_size:
                return await self._prompts.anew(session, request, prompt, most)
            return prompt
        except TooManyTokens as found:
            raise _too_long(found, context) from None

    def _check_elsewhere(self, session: LiveSession, key: str) -> None:
        """Raise RunsElsewhere if another worker runs an equal attempt: that one applies the rules of `retries`."""
        assert self._seat is not None
        if (worker := self._seat.find(digest_of(session.id, key))) is not None:
            raise RunsElsewhere(worker)

    def _check_room(self, request: TurnRequest) -> None:
        """Raise TooManyRequests if the turns of this request would exceed `--max-turns-in-flight`."""
        most = self._settings.max_turns_in_flight
        here = len(self._running) + len(self._unrecorded) + self._arriving
        if here + request.n + (self._seat.turns_elsewhere() if self._seat is not None else 0) > most:
            raise TooManyRequests(f"{most} turns are running (--max-turns-in-flight); try again", retry_after_s=1.0)

    async def _arrive(self, session: LiveSession, timeline: Timeline) -> None:
        """Wait until the gate lets requests in. A waiting request counts against the limit of turns in flight, and its
        session is in use."""
        self._arriving += 1
        session.waiting += 1
        timeline.held = time.monotonic()
        try:
            await self._gate.enter()
            timeline.let_in = time.monotonic()
        finally:
            self._arriving -= 1
            session.waiting -= 1
            session.touch()

    async def _earlier(self, session: LiveSession, request: TurnRequest, decision: Decision) -> Sequence[Choice] | None:
        """Return the choices of an earlier attempt that also answers this request, or None if it must be sampled.

        Only a replay lets others run meanwhile.
        """
        match decision:
            case Attach(attempt):
                request.timeline.note("attached")
                self._metrics.retries.by[("attached",)] += 1
                return self._choices[attempt]
            case Replay(attempt):
                request.timeline.note("replayed")
                self._metrics.retries.by[("replayed",)] += 1
                return [
                    await replay(self._renderer, session, request, attempt, interaction, self.give_way)
                    for interaction in attempt.interactions
                ]
        return None

    async def give_way(self) -> None:
        """Let others run: of all replies that are written again, one does a part of its work in a pass of the loop."""
        async with self._parts:
            await asyncio.sleep(0)

    async def _ids_of(self, session: LiveSession, text: PromptText, sender: Sender) -> Ids:
        """Return the ids of a turn's prompt. Raises InvalidRequest if there are none."""
        context = context_of(session, self._settings, self._gate.info().context_length)
        try:
            ids = await self._prompts.encode(text, most_in_prompt(session, context), sender)
        except TooManyTokens as found:
            raise _too_long(found, context) from None
        if not ids:
            raise InvalidRequest("'prompt' is empty; it must have at least one token", param="prompt")
        return ids

    async def encode(self, text: PromptText, sender: Sender) -> Ids:
        """Return the ids of a text that is no chat. Raises ContextLengthExceeded for several times the context."""
        context = context_of(None, self._settings, self._gate.info().context_length)
        try:
            return await self._prompts.encode(text, most_counted(context), sender)
        except TooManyTokens as found:
            raise _too_long(found, context) from None

    async def render(self, request: TurnRequest, sender: Sender, *, generation_prompt: bool) -> Ids:
        """Return the prompt of a conversation that is no session's. Raises as `prompt_ids`."""
        context = context_of(None, self._settings, self._gate.info().context_length)
        try:
            return await self._prompts.render(request, most_counted(context), sender, generation_prompt)
        except TooManyTokens as found:
            raise _too_long(found, context) from None

    async def continued(
        self, request: TurnRequest, known: Continued, sender: Sender, *, generation_prompt: bool
    ) -> Ids:
        """Return the ids of `known`, then those of the messages after them; nothing is recorded.

        Raises InvalidRequest, and ContextLengthExceeded for several times the context.
        """
        context = context_of(None, self._settings, self._gate.info().context_length)
        self._check_ids(known.ids, "continue_from.token_ids")
        if len(known.ids) > (most := most_counted(context)):
            raise ContextLengthExceeded(prompt_tokens=len(known.ids), context_tokens=context)
        try:
            return await self._prompts.continued(request, known, most, sender, generation_prompt)
        except TooManyTokens as found:
            raise _too_long(found, context) from None

    async def seen(self, request: TurnRequest, sender: Sender) -> tuple[Ids, PromptImages | None]:
        """Return the prompt of a request of token ids that is no session's: its images expanded, and their bytes.

        Raises InvalidRequest if the ids do not have the tokens of these images.
        """
        assert request.input_ids is not None
        ids, placed = await self._prompts.located(request.input_ids, request.images, sender)
        return ids, PromptImages(placed, self._images, request.files) if placed else None

    async def parse(self, ids: Ids, wanted: Parsing, sender: Sender) -> tuple[Message, FinishReason]:
        """Return the message of an output that is no turn, and why it ended. Raises InvalidRequest."""
        self._check_ids(ids, "tokens")
        if len(ids) > (most := context_of(None, self._settings, self._gate.info().context_length)):
            message = f"'tokens' holds {len(ids)} ids, but an output of the model has at most {most}"
            raise InvalidRequest(message, param="tokens")
        self._check_ids(wanted.prompt_ids or Ids("i"), "prompt_ids")
        return await self._prompts.parse(ids, wanted, sender)

    def _check_ids(self, ids: Ids, param: str) -> None:
        most = self._gate.info().vocab_size
        if max(ids, default=0) >= most:
            message = f"'{param}' has {max(ids)}, but the model's token ids end at {most - 1}"
            raise InvalidRequest(message, param=param)

    async def decode(self, ids: Ids, sender: Sender, *, special: bool = True) -> str:
        """Return the text of `ids`, with special tokens if `special`."""
        return await self._prompts.decode(ids, sender, special=special)

    async def prompt_ids(
        self, session: LiveSession, request: TurnRequest, *, generation_prompt: bool = True
    ) -> PromptIds:
        """Return the prompt that a turn would have; nothing is recorded.

        Raises InvalidRequest, and ContextLengthExceeded for several times the context.
        """
        follow_session(request, session.record)
        request = with_history(session, request)
        identity = _identify(session, request, keep=False)
        context = context_of(session, self._settings, self._gate.info().context_length)
        try:
            most = most_counted(context)
            return (await self._prompts.build(session, request, identity, most, generation_prompt)).ids
        except TooManyTokens as found:
            raise _too_long(found, context) from None

    def leave(self, attempt: Attempt) -> None:
        """Detach a reader. A running attempt without readers is cancelled after `GRACE_S` seconds."""
        if attempt.leave():
            attempt.grace = self._in_background(self._end_deserted(attempt), _GRACE)

    def replied(self, attempt: Attempt) -> None:
        """Record that the end of a reply was written to a client: an unmarked repetition is then a new sample."""
        if not attempt.written:
            attempt.written = True
            self._note_replied(attempt)  # of no interaction yet if the attempt ends in the next pass of the event loop

    def _note_replied(self, attempt: Attempt) -> None:
        for interaction in attempt.interactions:
            self._log.note_replied(interaction.id)

    def running_in(self, session: LiveSession) -> list[Turn]:
        """The turns of a session that run in this process now."""
        return [turn for turn in self._running if turn.session is session]

    def cancel_in(self, session: LiveSession) -> None:
        """Cancel the turns that run in a session which was deleted or withdrawn; their clients are told so."""
        for turn in self._running:
            if turn.session is session and not turn.committing:
                turn.cancel()

    def run_unrecorded(self, request: TurnRequest, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a generation outside all sessions, within the same limits of turns and places. Raises TooManyRequests.

        `drain` waits for it and cancels it as it does turns.
        """
        try:
            self._check_room(request)
        except TooManyRequests:
            work.close()
            raise
        task = asyncio.create_task(self._run_placed(request.sender, work))
        self._unrecorded.add(task)
        task.add_done_callback(self._unrecorded.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it ran
        return task

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [*(turn.task for turn in self._running if turn.task is not None), *self._unrecorded]

    async def _run_placed(self, sender: Sender, work: Coroutine[Any, Any, T]) -> T:
        await self._place(sender)
        try:
            return await work
        finally:
            self._places.give_back(sender)

    async def _place(self, sender: Sender) -> None:
        if not self._places.take_now(sender):
            await self._places.take(sender)

    async def drain(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` for running turns, then cancel them and record what they sampled.

        Return how many were cancelled.
        """
        self._draining = True
        self._gate.send_away()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        while (tasks := self._tasks()) and (left_s := ends_at - loop.time()) > 0:  # some may begin meanwhile
            await asyncio.wait(tasks, timeout=left_s)
        slow = [turn for turn in self._running if not turn.committing]
        others = list(self._unrecorded)
        for turn in slow:
            turn.cancel()
        for task in others:
            task.cancel()
        await asyncio.gather(*self._tasks(), return_exceptions=True)
        for task in self._background:
            if task.get_name() == _GRACE:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._commits.record_rest()
        return len(slow) + len(others)

    def _start(self, plan: ReplyPlan, choices: Sequence[Turn]) -> None:
        session, attempt = plan.session, plan.attempt
        self._named.ensure_stored(session)
        session.attempts.setdefault(attempt.key, []).append(attempt)
        self._choices[attempt] = choices
        if self._seat is not None:
            self._seat.add(digest_of(session.id, attempt.key), len(choices))
        left = len(choices)

        def ended(turn: Turn) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._attempt_ended(session, attempt)
            self._ended(turn)

        for turn in choices:
            session.begin_turn(turn.interaction.id)
            self._log.note_begun(turn.interaction.id, session.id, attempt.key, attempt.idempotency_key)
            self._running.add(turn)
            turn.task = asyncio.create_task(self._run(turn))
            turn.task.add_done_callback(lambda _, turn=turn: ended(turn))  # type: ignore[misc]

    def _attempt_ended(self, session: LiveSession, attempt: Attempt) -> None:
        """End an attempt: all its choices have ended and are recorded."""
        choices = self._choices.pop(attempt)
        attempt.end([turn.interaction for turn in choices])
        if attempt.stage is Stage.FAILED:
            merge_stored(session, attempt)
        elif self._unreplaced:  # the database takes turns
            for interaction_id in self._unreplaced:
                self._in_background(self._replace(interaction_id))
            self._unreplaced = set()
        if attempt.written:
            self._note_replied(attempt)
        if self._seat is not None:
            self._seat.remove(digest_of(session.id, attempt.key), len(choices))
        if attempt.superseded:
            attempt.superseded = False
            self._supersede(session, attempt)

    def _supersede(self, session: LiveSession, attempt: Attempt) -> None:
        """Replace a failed attempt by a newer one. An attempt that is still ending is replaced once it has failed."""
        attempt.superseded = True
        if attempt.stage is Stage.FAILED:
            session.attempts[attempt.key].remove(attempt)
            for interaction_id in attempt.failures():
                self._in_background(self._replace(interaction_id))

    async def _replace(self, interaction_id: str) -> None:
        """Note that a failed turn was replaced; if the database is down, once it takes turns again."""
        try:
            await self._log.supersede(interaction_id)
        except StoreUnavailable:
            self._unreplaced.add(interaction_id)

    def _ended(self, turn: Turn) -> None:
        turn.timeline.ended = time.monotonic()
        turn.session.end_turn(complete=turn.interaction.status is Status.COMPLETE)
        self._running.discard(turn)
        if turn.task is not None and not turn.task.cancelled():
            # Retrieve the exception: otherwise asyncio warns about a failed turn without a reader.
            turn.task.exception()

    async def _run(self, turn: Turn) -> Interaction:
        sender, turn.begun = turn.request.sender, True
        try:
            if turn.unwanted:
                raise asyncio.CancelledError
            if turn.index:  # the first has entered with its request
                await self._turnstile.enter(sender)
            await self._place(sender)
            turn.placed, finish = True, FinishReason.LENGTH
            if turn.generate.sampling.max_tokens:
                finish = await self._gate.sample(turn.generate, turn.take)
            turn.timeline.sampled = time.monotonic()
            return await self._commits.complete(turn, finish)
        except ProxyError as error:
            await self._commits.record_failure(turn, Status.FAILED, error.message)
            raise
        except asyncio.CancelledError:
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
            await self._commits.record_failure(turn, Status.FAILED, f"{type(error).__name__}: {error}")
            raise EngineFailed("the engine or the server failed in this turn; see the server's log") from error
        finally:
            if turn.placed:
                self._places.give_back(sender)
            if turn.order is not None:
                turn.order.end(turn.index)

    async def _end_deserted(self, attempt: Attempt) -> None:
        """Cancel the turns of an attempt without readers after the grace period, except those being committed."""
        await asyncio.sleep(GRACE_S)
        attempt.grace = None
        for turn in self._choices[attempt]:
            if not turn.committing:
                attempt.stage = Stage.ENDING
                turn.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


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


def _too_long(found: TooManyTokens, context: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(prompt_tokens=found.fewest, context_tokens=context, at_least=True)


def _is_retry(request: TurnRequest) -> bool:
    """Whether the client marks a request as the repetition of one that it may have sent before."""
    return request.retry or request.idempotency_key is not None


def _identify(session: LiveSession, request: TurnRequest, *, keep: bool = True) -> Identity:
    """Return the identity of a request; its messages become those of an earlier request where they are equal."""
    request.messages, identity = session.cache.recent.identify(
        request.messages, request.tools, request.template_options, keep=keep
    )
    return identity
