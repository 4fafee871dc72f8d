"""The life of a turn, written once for all APIs.

1 the request is parsed (protocols)    2 its session is resolved (sessions)      3 retries attach or replay
4 the parent is found                  5 the prompt is rendered or bridged       6 budgets are applied
7 tokens are sampled and parsed        8 it is proven and committed (commits)    9 only now the end goes out

A generation that fails, is cancelled or loses its client leaves no half interaction: what was sampled is kept with its
status. Cancellation at any point closes the engine's iterator, which frees the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from proxy.engine.gate import Gate
from proxy.engine.grammar import Grammar
from proxy.engine.requests import GenerateRequest
from proxy.errors import (
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    ProxyError,
    TooManyRequests,
)
from proxy.metrics import Metrics
from proxy.protocols.wire_protocol import new_hex
from proxy.rendering.renderer import Renderer
from proxy.sessions.attempts import Attempt, Stage
from proxy.sessions.session import Session
from proxy.sessions.sessions import Sessions
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.cache import Match
from proxy.trajectory.matching import identify, request_hash
from proxy.trajectory.tree import token_ids
from proxy.turns.budgets import apply_budgets
from proxy.turns.commits import Commits
from proxy.turns.defaults import check_capabilities, choice_of, with_defaults
from proxy.turns.prompts import Prompts, with_history
from proxy.turns.retries import Anew, Attach, Replay, decide
from proxy.turns.turn import Prompt, Turn, begin_interaction
from proxy.types import Api, FinishReason, Interaction, SamplingParams, Status, TurnRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A client that goes away may be retrying; another request may take its generation over within this time.
GRACE_S = 2.0
_GRACE = "grace"


class Turns:
    """Runs turns on one engine."""

    def __init__(
        self,
        *,
        gate: Gate,
        renderer: Renderer,
        store: Store,
        sessions: Sessions,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._renderer = renderer
        self._store = store
        self._sessions = sessions
        self._settings = settings
        self._metrics = metrics
        self._prompts = Prompts(renderer)
        self._running: set[Turn] = set()
        self._choices: dict[Attempt, Sequence[Turn]] = {}
        self._unrecorded: set[asyncio.Task[Any]] = set()
        self._arriving = 0
        self._background: set[asyncio.Task[None]] = set()
        self._commits = Commits(store, sessions, metrics, self._in_background)

    @property
    def busy(self) -> bool:
        """Whether any turn is under way."""
        return bool(self._running or self._unrecorded or self._arriving)

    async def begin(self, session: Session, request: TurnRequest, *, new_id: Callable[[], str]) -> Sequence[Turn]:
        """Start a turn for each of `n` choices: parent, prompt and budgets are settled, sampling runs.

        Raises InvalidRequest and its kin before anything is sampled.
        """
        session.check_open()
        info = self._gate.info()
        wanted = with_defaults(request, session.record.sampling)
        check_capabilities(request, wanted, info)
        request = with_history(session, request)
        identity = identify(request.messages, request.tools, request.template_options)
        key = request_hash(replace(request, sampling=wanted), identity)
        if not request.retry:
            await self._sessions.settle(session, key)
        if (earlier := self._earlier(session, request, key)) is not None:
            return earlier
        self._check_room(request)
        await self._arrive()
        if request.input_ids is None:
            prompt = await self._prompts.build(session, request, identity)
        else:
            prompt, conversation = await self._prompts.given(session, request.input_ids)
            request = replace(request, messages=conversation)
        self._prompts.check_vocabulary(prompt.ids, info.vocab_size, rendered=request.input_ids is None)
        sampling = apply_budgets(wanted, request.n, session, len(prompt.ids), self._settings, info.context_length)
        grammar = self._prompts.grammar(request)
        # Others may have gone on while a long prompt was rendered: from here to the start nothing is awaited.
        session.check_open()
        if (earlier := self._earlier(session, request, key)) is not None:
            return earlier
        self._check_room(request)
        attempt, reply = Attempt(key, request.idempotency_key), new_id()
        choices = [
            self._choice(session, request, prompt, attempt, choice_of(sampling, k), grammar, reply, k)
            for k in range(request.n)
        ]
        self._start(session, request, attempt, choices)
        return choices

    def _check_room(self, request: TurnRequest) -> None:
        """Raise TooManyRequests before a turn is rendered that would be one too many."""
        most = self._settings.max_turns_in_flight
        if len(self._running) + len(self._unrecorded) + self._arriving + request.n > most:
            raise TooManyRequests(f"{most} turns are running (--max-turns-in-flight); try again", retry_after_s=1.0)

    async def _arrive(self) -> None:
        """Wait until requests are let in. What has begun is counted already, should a pause hold it up later."""
        self._arriving += 1
        try:
            await self._gate.enter()
        finally:
            self._arriving -= 1

    def _earlier(self, session: Session, request: TurnRequest, key: str) -> Sequence[Turn] | None:
        """The turns of an earlier attempt that answer this request too; None: it is to be sampled."""
        match decide(session.attempts.get(key, ()), request):
            case Attach(attempt):
                return self._choices[attempt]
            case Replay(attempt, interactions):
                return [self._replayed(session, request, attempt, interaction) for interaction in interactions]
        return None

    async def count(self, session: Session, request: TurnRequest) -> int:
        """How many prompt tokens a turn would have. Raises InvalidRequest."""
        request = with_history(session, request)
        identity = identify(request.messages, request.tools, request.template_options)
        return len((await self._prompts.build(session, request, identity)).ids)

    def _choice(
        self,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        attempt: Attempt,
        sampling: SamplingParams,
        grammar: Grammar | None,
        reply_id: str,
        k: int,
    ) -> Turn:
        """Choice `k` of a reply, not yet started."""
        interaction_id = reply_id if k == 0 else f"{reply_id}.{k}"
        interaction = begin_interaction(
            interaction_id, session.id, replace(request, sampling=sampling), prompt, attempt.key
        )
        interaction.grammar = grammar is not None
        generate = GenerateRequest(
            request_id=interaction.id,
            input_ids=prompt.ids,
            sampling=sampling,
            stop_token_ids=self._stop_tokens(request),
            grammar=grammar,
            top_logprobs=request.top_logprobs,
            session_id=session.id,
            turn=request,
            turn_number=session.turns_taken + k,
        )
        make_id = new_call_id if request.api is not Api.MESSAGES else new_tool_use_id
        parser = self._renderer.parser(request.tools, request.tool_choice, prompt.ids, sampling.stop, make_id)
        piece, encode = self._renderer.piece, self._renderer.encode
        return Turn(interaction, request, session, prompt, generate, parser, piece, encode, attempt)

    def _stop_tokens(self, request: TurnRequest) -> tuple[int, ...]:
        if request.sampling.ignore_eos:
            return ()
        return self._renderer.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids

    def join(self, turn: Turn) -> None:
        """A client begins to read a turn."""
        turn.attempt.join()

    def leave(self, turn: Turn) -> None:
        """A client is gone. The last one leaving an unfinished reply ends it after the grace."""
        if turn.attempt.leave():
            turn.attempt.grace = self._in_background(self._end_deserted(turn.attempt), _GRACE)

    def replied(self, turn: Turn) -> None:
        """The end of a reply was written out."""
        if not turn.attempt.written:
            turn.attempt.written = True
            for interaction in turn.attempt.interactions:
                self._store.note_replied(interaction.id)

    @property
    def held_up(self) -> bool:
        """Whether a turn would have to wait for a paused engine before it begins."""
        return self._gate.closed

    def run_unrecorded(self, request: TurnRequest, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Sample beside all sessions, within the same limit of turns and to the same end. Raises TooManyRequests."""
        try:
            self._check_room(request)
        except TooManyRequests:
            work.close()
            raise
        task = asyncio.create_task(work)
        self._unrecorded.add(task)
        task.add_done_callback(self._unrecorded.discard)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Let what runs end, for `timeout_s` at most; then cancel it. What turns sampled is recorded."""
        self._gate.send_away()
        tasks = [turn.task for turn in self._running if turn.task is not None]
        if others := [*tasks, *self._unrecorded]:
            await asyncio.wait(others, timeout=timeout_s)
        for turn in list(self._running):
            if turn.task is not None and not turn.committing:
                turn.task.cancel()
        for task in self._unrecorded:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in self._background:
            if task.get_name() == _GRACE:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # 7 ---------------------------------------------------------------------------------------------------------

    def _start(self, session: Session, request: TurnRequest, attempt: Attempt, choices: Sequence[Turn]) -> None:
        self._sessions.ensure_stored(session)
        attempts = session.attempts.setdefault(attempt.key, [])
        decision = decide(attempts, request)
        if isinstance(decision, Anew):
            for failed in decision.superseded:
                self._supersede(session, failed)
        attempts.append(attempt)
        self._choices[attempt] = choices
        left = len(choices)

        def ended(turn: Turn) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._attempt_ended(session, attempt)
            self._ended(turn)

        for turn in choices:
            session.begin_turn(turn.interaction.id)
            self._store.note_begun(turn.interaction.id, session.id)
            self._running.add(turn)
            self._metrics.in_flight.inc()
            turn.task = asyncio.create_task(self._run(turn))
            turn.task.add_done_callback(lambda _, turn=turn: ended(turn))  # type: ignore[misc]

    def _attempt_ended(self, session: Session, attempt: Attempt) -> None:
        """All choices of a reply have ended, and are recorded."""
        attempt.end([turn.interaction for turn in self._choices.pop(attempt)])
        if attempt.superseded:
            attempt.superseded = False
            self._supersede(session, attempt)

    def _supersede(self, session: Session, attempt: Attempt) -> None:
        """A new attempt takes the place of a failed one, or of one that is ending, once its failure is recorded."""
        attempt.superseded = True
        if attempt.stage is Stage.FAILED:
            session.attempts[attempt.key].remove(attempt)
            for interaction_id in attempt.failures():
                self._in_background(self._store.supersede(interaction_id))

    def _ended(self, turn: Turn) -> None:
        turn.session.end_turn(complete=turn.interaction.status is Status.COMPLETE)
        self._running.discard(turn)
        self._metrics.in_flight.dec()
        turn.wake()
        if turn.task is not None and not turn.task.cancelled():
            turn.task.exception()  # readers get it; without readers nobody is to be warned about it

    def _replayed(self, session: Session, request: TurnRequest, attempt: Attempt, interaction: Interaction) -> Turn:
        """A turn that has ended already: the committed interaction, to be written out again."""
        node = session.cache.nodes[interaction.id]
        ids = token_ids(node)[: interaction.prompt_tokens]
        prompt = Prompt(ids, Match(node.parent, 0), identify((), (), {}), bridged=interaction.aligned)
        generate = GenerateRequest(interaction.id, ids, interaction.sampling, self._renderer.stop_token_ids)
        call_ids = iter([call.id for call in interaction.output.tool_calls])
        stop = interaction.sampling.stop
        parser = self._renderer.parser(request.tools, request.tool_choice, ids, stop, lambda: next(call_ids, ""))
        piece, encode = self._renderer.piece, self._renderer.encode
        turn = Turn(interaction, request, session, prompt, generate, parser, piece, encode, attempt)
        turn.committing = True
        turn.replay()
        return turn

    async def _run(self, turn: Turn) -> Interaction:
        try:
            finish = await self._sample(turn) if turn.generate.sampling.max_tokens else FinishReason.LENGTH
            return await self._commits.complete(turn, finish)
        except ProxyError as error:
            await self._commits.record_failure(turn, Status.FAILED, error.message)
            raise
        except asyncio.CancelledError:
            await self._commits.record_failure(turn, Status.ABORTED, "the client went away, or the server stopped")
            raise EngineUnavailable("this reply was cancelled; try again") from None
        except Exception as error:
            logger.exception("turn %s failed", turn.interaction.id)
            await self._commits.record_failure(turn, Status.FAILED, f"{type(error).__name__}: {error}")
            raise EngineFailed("the engine or the server failed in this turn; see the server's log") from error

    async def _sample(self, turn: Turn) -> FinishReason:
        """Read chunks until the engine ends, a stop string is complete or an end token comes."""
        limit_s = self._settings.engine_timeout_s
        try:
            async with asyncio.timeout(limit_s) as timer, aclosing(self._chunks(turn, timer)) as chunks:
                async for chunk in chunks:
                    timer.reschedule(self._gate.deadline(limit_s))
                    finish = turn.take(chunk)
                    if finish is not None:
                        return finish
        except TimeoutError:
            raise EngineTimeout(f"the engine gave no token for {limit_s:g} s") from None
        raise EngineFailed("the engine ended a reply without saying why")

    def _chunks(self, turn: Turn, timer: asyncio.Timeout) -> Any:
        return self._gate.generate(turn.generate, timer)

    async def _end_deserted(self, attempt: Attempt) -> None:
        await asyncio.sleep(GRACE_S)
        attempt.grace = None
        for turn in self._choices[attempt]:
            if turn.task is not None and not turn.committing:
                attempt.stage = Stage.ENDING
                turn.task.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def new_tool_use_id() -> str:
    """An id for a tool call in Anthropic's style."""
    return "toolu_" + new_hex()[:24]


def new_call_id() -> str:
    """An id for a tool call in OpenAI's style."""

    return "call_" + new_hex()[:24]
