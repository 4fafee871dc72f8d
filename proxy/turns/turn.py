"""One generation under way. A client sees the end of it only after the commit.

`deltas` may be read by several clients at once, from the beginning: a retry attaches to the same generation.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from proxy.engine.chunks import TokenChunk, check_chunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.versions import corrected, with_run
from proxy.protocols.wire_protocol import Answer
from proxy.rendering import OutputParser
from proxy.rendering.deltas import Delta, TextDelta, TokenLogprob, ToolCallArguments, ToolCallEnd
from proxy.sessions.attempts import Attempt
from proxy.sessions.session import Session
from proxy.trajectory.cache import Match
from proxy.trajectory.matching import Identity, messages_hash
from proxy.trajectory.purpose import hinted
from proxy.types import FinishReason, Ids, Interaction, Message, Reason, Role, Status, TurnRequest, ids_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids for the engine, and the parent that they are meant to continue. `bridged` False: rendered in full."""

    ids: Ids
    match: Match
    identity: Identity
    bridged: bool


@dataclass(slots=True, eq=False)
class Turn:
    """One generation and what was made of it so far. Clients read `deltas`; the last of them leaving ends it."""

    interaction: Interaction
    request: TurnRequest
    session: Session
    prompt: Prompt
    generate: GenerateRequest
    parser: OutputParser
    piece: Callable[[int], bytes]
    encode: Callable[[str], Ids]
    attempt: Attempt
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    committing: bool = False
    task: asyncio.Future[Interaction] | None = None
    _unreported: list[TokenLogprob] = field(default_factory=list)
    _held: list[Delta] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self) -> Answer:
        """The committed interaction of an ended turn. Raises the ProxyError that ended it otherwise."""
        assert self.task is not None
        interaction = self.task.result()
        shown = self.request.logprobs and interaction.has_logprobs
        return Answer(interaction, tuple(self.logprobs) if shown else None)

    async def stream(self, patience_s: float) -> AsyncIterator[list[Delta]]:
        """The deltas in batches as they come, an empty batch after `patience_s` without one.

        Ends when the turn is committed; raises the ProxyError that ended it otherwise.
        """
        assert self.task is not None
        seen = 0
        while True:
            if seen < len(self.deltas):
                batch = self.deltas[seen:]
                seen += len(batch)
                yield batch
            elif self.task.done():
                self.task.result()
                return
            elif not await self._wait(patience_s):
                yield []

    async def _wait(self, patience_s: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(patience_s):
                return await self._changed.wait()
        except TimeoutError:
            return False

    def take(self, chunk: TokenChunk) -> FinishReason | None:
        """Add a chunk; what follows an end token or a complete stop string never gets in.

        Returns why sampling ends here, None while it goes on. Raises EngineFailed for an inconsistent chunk.
        """
        if chunk.text is not None:
            chunk = self._encoded(chunk, chunk.text)
        check_chunk(chunk)
        interaction = self.interaction
        if not chunk.sampled:
            interaction.trainable = interaction.has_logprobs = False
        if chunk.cached_tokens is not None:
            interaction.cached_tokens = chunk.cached_tokens
        interaction.versions = corrected(interaction.versions, chunk.corrected)
        ids, ended = _until_end(chunk.ids, self.generate.stop_token_ids)
        if ids and not interaction.output_ids:
            interaction.first_token_at = time.time()
        step = len(ids) if self._takes_whole_chunks else 1
        for at in range(0, len(ids), step or 1):
            finish = self._feed(ids[at : at + step], chunk, at)
            if finish is not None:
                return finish
        return FinishReason.STOP if ended else chunk.finish

    def _encoded(self, chunk: TokenChunk, text: str) -> TokenChunk:
        """A chunk that came as text, as ids within the budget, and an end token if it ends by itself."""
        most, stops = self.generate.sampling.max_tokens, self.generate.stop_token_ids
        ids = self.encode(text)
        if chunk.finish is FinishReason.STOP and stops and not (ids and ids[-1] in stops):
            ids = ids + ids_of(stops[:1])
        finish = FinishReason.LENGTH if most is not None and len(ids) > most else chunk.finish
        ids = ids[:most]
        return TokenChunk(ids, array("f", bytes(4 * len(ids))), chunk.version, finish, sampled=False)

    @property
    def _takes_whole_chunks(self) -> bool:
        """Not where each token matters by itself: for its logprob, or because the first call is to be the last."""
        return not self.request.logprobs and (self.request.parallel_tool_calls or not self.request.tools)

    def _feed(self, ids: Ids, chunk: TokenChunk, at: int) -> FinishReason | None:
        """Parse ids that begin at `at` in their chunk; returns why sampling ends with them."""
        parser, already = self.parser, len(self.interaction.output_ids)
        reasoned = parser.reasoning_tokens
        deltas = parser.feed(ids)
        stopped = parser.stop_string is not None
        kept = ids[: parser.kept - already] if stopped else ids
        self._append(kept, chunk, at)
        if self.request.logprobs and chunk.sampled and kept and parser.reasoning_tokens == reasoned:
            self._note_logprob(kept[0], chunk.logprobs[at], chunk.top_logprobs[at] if chunk.top_logprobs else ())
        self.publish(deltas)
        if stopped:
            return FinishReason.STOP_STRING
        one_call = not self.request.parallel_tool_calls and any(isinstance(delta, ToolCallEnd) for delta in deltas)
        return FinishReason.STOP if one_call else None

    def _note_logprob(self, token: int, value: float, top: tuple[tuple[int, float], ...]) -> None:
        """Report a visible token once, with the next piece of text that goes out."""
        if token in self.generate.stop_token_ids:
            return
        entry = self._logprob(token, value, tuple(self._logprob(other, logprob) for other, logprob in top))
        self.logprobs.append(entry)
        self._unreported.append(entry)

    def _logprob(self, token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        utf8 = self.piece(token)
        return TokenLogprob(utf8.decode("utf-8", "replace"), utf8, value, top)

    def _append(self, ids: Ids, chunk: TokenChunk, at: int) -> None:
        if not ids:
            return
        interaction = self.interaction
        interaction.output_ids += ids
        interaction.logprobs += chunk.logprobs[at : at + len(ids)]
        interaction.versions = with_run(interaction.versions, len(ids), chunk.version)

    def prove(self) -> None:
        """Set `aligned` by comparing ids, and keep only what the prompt adds to an aligned parent, else all of it."""
        interaction, prompt, parent = self.interaction, self.prompt, self.prompt.match.parent
        aligned = parent is not None and prompt.bridged and self.session.cache.proves(parent, prompt.ids)
        interaction.aligned = aligned
        interaction.prefix_length = parent.length if parent is not None and aligned else 0
        interaction.prompt_suffix = prompt.ids[interaction.prefix_length :]

    def publish(self, deltas: list[Delta]) -> None:
        """Pass deltas on, or hold them: a client may act on a closed call, so from there on the commit comes first.

        The last fragment of the arguments closes a call for those clients whose API has no event for it.
        """
        for delta in deltas:
            if isinstance(delta, TextDelta) and self._unreported:
                delta = TextDelta(delta.text, tuple(self._unreported))
                self._unreported.clear()
            if self._held or isinstance(delta, ToolCallArguments | ToolCallEnd):
                self._hold(delta)
            else:
                self.deltas.append(delta)
        self._changed.set()

    def _hold(self, delta: Delta) -> None:
        """Hold a delta; while no call is closed, the fragment of arguments before it turns out not to be the last."""
        if (
            isinstance(delta, ToolCallArguments)
            and len(self._held) == 1
            and isinstance(self._held[0], ToolCallArguments)
        ):
            self.deltas.append(self._held.pop())
        self._held.append(delta)

    def release(self) -> None:
        """Let go what was held: the turn is committed."""
        self.deltas += self._held
        self._held.clear()
        self._changed.set()

    def replay(self) -> None:
        """Become a turn that ended with its stored interaction, by parsing its tokens again.

        Alternatives of tokens are not stored: logprobs come without them.
        """
        interaction = self.interaction
        for token, value in zip(interaction.output_ids, interaction.logprobs, strict=True):
            reasoned = self.parser.reasoning_tokens
            deltas = self.parser.feed(ids_of([token]))
            if self.request.logprobs and interaction.has_logprobs and self.parser.reasoning_tokens == reasoned:
                self._note_logprob(token, value, ())
            self.publish(deltas)
        self.publish(self.parser.finish())
        self.release()
        self.task = asyncio.get_running_loop().create_future()
        self.task.set_result(interaction)

    def wake(self) -> None:
        """Let readers look again: the task has ended."""
        self._changed.set()


def begin_interaction(
    interaction_id: str, session_id: str, request: TurnRequest, prompt: Prompt, key: str
) -> Interaction:
    """The interaction of a turn that begins now; the tree and the tokens come at its end."""
    parent = prompt.match.parent
    return Interaction(
        id=interaction_id,
        session_id=session_id,
        parent_id=parent.interaction.id if parent is not None else None,
        aligned=False,
        reason=Reason.NEW_ROOT,
        api=request.api,
        status=Status.BEGUN,
        new_messages=prompt.match.new_messages(request.messages),
        output=Message(Role.ASSISTANT),
        prefix_length=0,
        prompt_suffix=ids_of(),
        output_ids=ids_of(),
        logprobs=array("f"),
        versions=(),
        finish_reason=None,
        sampling=request.sampling,
        tools=request.tools if parent is None else (),
        template_options=request.template_options if parent is None else {},
        model=request.model,
        state_hash=request.state_hash or messages_hash(prompt.match.new_messages(request.messages)),
        purpose=request.purpose or hinted(request),
        agent=request.agent,
        request_hash=key,
        dropped=request.dropped,
        idempotency_key=request.idempotency_key,
        created_at=time.time(),
    )


def _until_end(ids: Ids, stop_token_ids: tuple[int, ...]) -> tuple[Ids, bool]:
    """`ids` up to and with the first end token, and whether there was one."""
    for index, token in enumerate(ids):
        if token in stop_token_ids:
            return ids[: index + 1], True
    return ids, False
