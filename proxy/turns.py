"""The life of a turn, written once for all APIs.

1 the request is parsed (protocols)    2 its session is resolved (sessions)      3 retries (not yet)
4 the parent is found                  5 the prompt is rendered or bridged       6 budgets are applied
7 tokens are sampled and parsed        8 alignment is proven, the turn committed 9 only now the end goes out

A generation that fails, is cancelled or loses its client leaves no half interaction: what was sampled is kept with its
status. Cancellation at any point ends in one `finally` that frees the engine request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from proxy.budgets import apply_budgets
from proxy.engine.base import Capability, Engine, EngineInfo
from proxy.errors import (
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
    SessionNotFound,
    StoreUnavailable,
    UnsupportedParameter,
)
from proxy.metrics import Metrics
from proxy.rendering.renderer import Renderer
from proxy.sessions import Session, Sessions
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.cache import Match, Node
from proxy.trajectory.matching import identify
from proxy.turn import Prompt, Turn, begin_interaction
from proxy.types import (
    FinishReason,
    GenerateRequest,
    Ids,
    Interaction,
    Reason,
    SamplingParams,
    Status,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)

logger = logging.getLogger(__name__)

# A client that goes away may be retrying; another request may take its generation over within this time.
GRACE_S = 2.0
# Longer texts are rendered in a worker thread, so that they do not hold up everybody else's tokens.
_INLINE_CHARS = 40_000


class Turns:
    """Runs turns on one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        store: Store,
        sessions: Sessions,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._store = store
        self._sessions = sessions
        self._settings = settings
        self._metrics = metrics
        self._running: set[Turn] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._graces: set[asyncio.Task[None]] = set()

    async def begin(self, session: Session, request: TurnRequest, *, new_id: Callable[[], str]) -> Turn:
        """Start a turn: parent, prompt and budgets are settled, sampling runs. Raises InvalidRequest and its kin."""
        session.check_open()
        info = self._engine.info()
        wanted = with_defaults(request, session.record.sampling)
        _check_capabilities(request.tool_choice, wanted, info)
        prompt = await self._prompt(session, request)
        sampling = apply_budgets(wanted, session, len(prompt.ids), self._settings, info.context_length)
        interaction = begin_interaction(new_id(), session.id, replace(request, sampling=sampling), prompt)
        self._check_vocabulary(prompt.ids)
        grammar = self._renderer.tool_grammar(request.tools, request.tool_choice, request.parallel_tool_calls)
        if grammar is not None:
            interaction.notes = {**interaction.notes, "grammar": True}
        generate = GenerateRequest(
            request_id=interaction.id,
            input_ids=prompt.ids,
            sampling=sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            grammar=grammar,
            session_id=session.id,
            turn=request,
        )
        parser = self._renderer.parser(request.tools, request.tool_choice, prompt.ids, sampling.stop, new_call_id)
        turn = Turn(interaction, request, session, prompt, generate, parser)
        self._start(turn)
        return turn

    def join(self, turn: Turn) -> None:
        """A client begins to read a turn."""
        turn.readers += 1

    def leave(self, turn: Turn) -> None:
        """A client is gone. The last one leaving an unfinished turn ends it after the grace."""
        turn.readers -= 1
        if turn.readers == 0 and turn.task is not None and not turn.task.done():
            self._in_background(self._end_deserted(turn), self._graces)

    def replied(self, interaction: Interaction) -> None:
        """The end of a reply was written out."""
        self._store.note_replied(interaction.id)

    async def drain(self, timeout_s: float) -> None:
        """Let running turns end, for `timeout_s` at most; then cancel them. What they sampled is recorded."""
        tasks = [turn.task for turn in self._running if turn.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for turn in list(self._running):
            if turn.task is not None and not turn.committing:
                turn.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for grace in self._graces:
            grace.cancel()
        await asyncio.gather(*self._graces, *self._background, return_exceptions=True)

    # 4 and 5 ---------------------------------------------------------------------------------------------------

    async def _prompt(self, session: Session, request: TurnRequest) -> Prompt:
        identity = identify(request.messages, request.tools, request.template_options)
        match = session.cache.find_parent(request, identity)
        if match.parent is not None:
            ids = await self._bridge(session, request, match)
            if ids is not None:
                return Prompt(ids, match, identity, bridged=True)
        render = self._renderer.render
        ids = await _inline_or_thread(
            request.messages, render, request.messages, request.tools, request.template_options
        )
        return Prompt(ids, match, identity, bridged=False)

    async def _bridge(self, session: Session, request: TurnRequest, match: Match) -> Ids | None:
        """The parent's exact tokens and the new messages' tokens after them."""
        assert match.parent is not None
        before = session.cache.token_ids(match.parent)
        answer = match.parent.interaction
        split = len(before) - len(answer.output_ids)
        new = match.new_messages(request.messages)
        suffix = await _inline_or_thread(
            new,
            self._renderer.bridge,
            before[:split],
            answer.output_ids,
            answer.output,
            new,
            request.tools,
            request.template_options,
        )
        return None if suffix is None else before + suffix

    # 7 ---------------------------------------------------------------------------------------------------------

    def _start(self, turn: Turn) -> None:
        turn.session.turns += 1
        self._store.note_begun(turn.interaction.id, turn.session.id)
        self._running.add(turn)
        self._metrics.in_flight.inc()
        turn.task = asyncio.create_task(self._run(turn))
        turn.task.add_done_callback(lambda _: self._ended(turn))

    def _ended(self, turn: Turn) -> None:
        turn.session.turns -= 1
        turn.session.used_at = time.monotonic()
        self._running.discard(turn)
        self._metrics.in_flight.dec()
        turn.wake()
        if turn.task is not None and not turn.task.cancelled():
            turn.task.exception()  # readers get it; without readers nobody is to be warned about it

    async def _run(self, turn: Turn) -> Interaction:
        try:
            finish = await self._sample(turn) if turn.generate.sampling.max_tokens else FinishReason.LENGTH
            return await self._complete(turn, finish)
        except ProxyError as error:
            await self._record_failure(turn, Status.FAILED, error.message)
            raise
        except asyncio.CancelledError:
            await self._record_failure(turn, Status.ABORTED, "the client went away, or the server stopped")
            raise EngineUnavailable("this reply was cancelled; try again") from None
        except Exception as error:
            logger.exception("turn %s failed", turn.interaction.id)
            await self._record_failure(turn, Status.FAILED, f"{type(error).__name__}: {error}")
            raise EngineFailed("the engine or the server failed in this turn; see the server's log") from error

    async def _sample(self, turn: Turn) -> FinishReason:
        """Read chunks until the engine ends, a stop string is complete or an end token comes."""
        loop = asyncio.get_running_loop()
        limit_s = self._settings.engine_timeout_s
        try:
            async with asyncio.timeout(limit_s) as timer, aclosing(self._chunks(turn)) as chunks:
                async for chunk in chunks:
                    timer.reschedule(loop.time() + limit_s)
                    finish = turn.take(chunk)
                    if finish is not None:
                        return finish
        except TimeoutError:
            raise EngineTimeout(f"the engine gave no token for {limit_s:g} s") from None
        raise EngineFailed("the engine ended a reply without saying why")

    def _chunks(self, turn: Turn) -> Any:
        return self._engine.generate(turn.generate)

    # 8 ---------------------------------------------------------------------------------------------------------

    async def _complete(self, turn: Turn, finish: FinishReason) -> Interaction:
        interaction, session, prompt = turn.interaction, turn.session, turn.prompt
        if finish is FinishReason.ABORT:
            raise EngineFailed("the engine aborted this reply")
        turn.publish(turn.parser.finish())
        self._describe(turn, finish)
        _prove(turn)
        interaction.reason = self._reason(turn)
        node = session.cache.node_for(interaction, prompt.identity, prompt.match)
        session.cache.claim(node)
        turn.committing = True  # from here on nobody cancels it: it is on its way to the disk
        try:
            await self._store.append(interaction)
        except ProxyError as error:
            turn.committing = False
            session.cache.release(node)
            if isinstance(error, SessionNotFound):
                raise StoreUnavailable(f"session {session.id!r} could not be stored; try again") from None
            raise
        self._committed(turn, node)
        return interaction

    def _committed(self, turn: Turn, node: Node) -> None:
        """Let everybody see a turn that is on the disk."""
        session = turn.session
        session.cache.publish(node)
        session.sampled_tokens += len(turn.interaction.output_ids)
        turn.release()
        self._count(turn)
        if session.ended.is_set():
            self._in_background(self._sessions.refresh_returns(session))

    def _describe(self, turn: Turn, finish: FinishReason) -> None:
        interaction, parser = turn.interaction, turn.parser
        interaction.output = parser.message
        interaction.stop_string = parser.stop_string
        interaction.reasoning_tokens = parser.reasoning_tokens
        if parser.malformed_calls:
            interaction.notes = {**interaction.notes, "malformed_calls": parser.malformed_calls}
        calls_end = finish is FinishReason.STOP and bool(parser.message.tool_calls)
        interaction.finish_reason = FinishReason.TOOL_CALLS if calls_end else finish
        interaction.status = Status.COMPLETE
        interaction.completed_at = time.time()

    def _reason(self, turn: Turn) -> Reason:
        if turn.interaction.parent_id is not None and not turn.interaction.aligned:
            return Reason.DRIFT if turn.prompt.bridged else Reason.TEMPLATE
        return turn.session.cache.reason_for(turn.request, turn.prompt.identity, turn.prompt.match)

    async def _record_failure(self, turn: Turn, status: Status, error: str) -> None:
        """Keep what was sampled, with its status; it is never exported unless asked for."""
        interaction = turn.interaction
        if turn.committing:
            return
        interaction.status, interaction.error, interaction.completed_at = status, error, time.time()
        _prove(turn)
        turn.parser.finish()
        interaction.output = turn.parser.message
        self._metrics.turns.labels(turn.request.api.value, status.value).inc()
        try:
            await self._store.append(interaction)
        except ProxyError as problem:
            logger.error("could not record the %s turn %s: %s", status, interaction.id, problem.message)

    async def _end_deserted(self, turn: Turn) -> None:
        await asyncio.sleep(GRACE_S)
        if turn.readers == 0 and turn.task is not None and not turn.committing:
            turn.task.cancel()

    def _check_vocabulary(self, ids: Ids) -> None:
        """Raise InvalidRequest for an id that the model has no row for: some engines die of one."""
        most = self._engine.info().vocab_size
        if self._renderer.vocab_size > most and max(ids) >= most:
            raise InvalidRequest(f"the prompt has token {max(ids)}, the model knows {most}", param="messages")

    def _count(self, turn: Turn) -> None:
        interaction, metrics = turn.interaction, self._metrics
        metrics.turns.labels(interaction.api.value, interaction.status.value).inc()
        metrics.reasons.labels(interaction.reason.value).inc()
        metrics.tokens.labels("prompt").inc(interaction.prompt_tokens)
        metrics.tokens.labels("output").inc(len(interaction.output_ids))
        if turn.parser.malformed_calls:
            metrics.malformed.inc(turn.parser.malformed_calls)
        if interaction.parent_id is not None and not interaction.aligned:
            metrics.unaligned.inc()
            logger.warning("interaction %s is not joined with its parent: %s", interaction.id, interaction.reason)
        if interaction.first_token_at is not None:
            metrics.first_token.observe(interaction.first_token_at - interaction.created_at)
        metrics.duration.observe(time.time() - interaction.created_at)

    def _in_background(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._background if group is None else group
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


_FORCED = (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


def _check_capabilities(choice: ToolChoice, sampling: SamplingParams, info: EngineInfo) -> None:
    """Raise UnsupportedParameter for what the engine cannot honour, InvalidRequest for a bias on an unknown token."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    needs = {
        "tool_choice": (choice.mode in _FORCED, Capability.GRAMMAR),
        "seed": (sampling.seed is not None, Capability.SEED),
        "logit_bias": (bool(sampling.logit_bias), Capability.LOGIT_BIAS),
        "presence_penalty": (penalties != (0.0, 0.0, 1.0), Capability.PENALTIES),
    }
    for name, (needed, capability) in needs.items():
        if needed and capability not in info.capabilities:
            raise UnsupportedParameter(f"this engine cannot honour '{name}'; leave it out", param=name)
    for token, _ in sampling.logit_bias:
        if token >= info.vocab_size:
            message = f"'logit_bias' names token {token}, but the vocabulary has {info.vocab_size}"
            raise InvalidRequest(message, param="logit_bias")


def _prove(turn: Turn) -> None:
    """Set `aligned` by comparing ids, and keep only what the prompt adds to an aligned parent, else all of it."""
    interaction, prompt, parent = turn.interaction, turn.prompt, turn.prompt.match.parent
    aligned = parent is not None and prompt.bridged and turn.session.cache.proves(parent, prompt.ids)
    interaction.aligned = aligned
    interaction.prefix_length = parent.length if parent is not None and aligned else 0
    interaction.prompt_suffix = prompt.ids[interaction.prefix_length :]


def new_call_id() -> str:
    """An id for a tool call that was sampled here."""

    return "call_" + uuid.uuid4().hex[:24]


def with_defaults(request: TurnRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """The request's sampling, with the session's own where the request says nothing."""
    rest = {name: value for name, value in defaults.items() if name not in request.given}
    return replace(request.sampling, **rest) if rest else request.sampling


async def _inline_or_thread(messages: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a rendering function here when its text is short, else in a worker thread."""
    if sum(len(message.content) for message in messages) <= _INLINE_CHARS:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)
