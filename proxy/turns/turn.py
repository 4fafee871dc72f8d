"""One running generation. Its readers see its end only after the commit.

Several clients may read `deltas` at once, each from the beginning: a retry attaches to the running generation.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.versions import corrected, with_run
from proxy.protocols.wire_protocol import Answer
from proxy.rendering import OutputParser
from proxy.rendering.deltas import Delta, TokensDelta, ToolCallArguments, ToolCallEnd
from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.side_columns.columns import NO_COLUMNS, Columns
from proxy.telemetry.timeline import Timeline
from proxy.turns.choice import ChoiceOrder
from proxy.turns.column_log import ColumnLog
from proxy.turns.given_answer import GivenAnswer
from proxy.turns.logprob_report import LogprobReport
from proxy.turns.prompts import Prompt
from proxy.types import Ids, Interaction, Logprobs, Sampler, TurnRequest, ids_of
from tokengrove.reasons import FinishReason, LogprobsOf

_MAY_END = (ToolCallArguments, ToolCallEnd, TokensDelta)


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """A `Choice` that is being generated: the interaction that it records, and its output so far.

    `index`: its index among the choices of the reply. `order`: the commit order of the choices; None for the only
    choice. `sample`: samples it on its route. `columns`: its side columns while it runs, if it records any.
    `recorded`: the side columns of the ended turn, until they are committed. `encode` tokenizes text from engines that
    return no token ids. `raw_text` returns the text of an output, markup included. `begun`: its task has started.
    `unwanted`: it was cancelled, possibly before it started. `placed`: it has one of the `Places`. `committing`: it is
    being committed and can no longer be cancelled. `ended`: its task, from its start on. `held`: deltas that
    wait for the commit. `timeline`: the times of its phases; complete once the turn has `ended`.
    """

    interaction: Interaction
    request: TurnRequest
    session: LiveSession
    attempt: Attempt
    index: int = 0
    order: ChoiceOrder | None = None
    prompt: Prompt
    sample: Callable[[Turn], Awaitable[FinishReason]]
    generate: GenerateRequest
    columns: ColumnLog | None = None
    recorded: Columns = field(default_factory=dict)
    parser: OutputParser | GivenAnswer
    report: LogprobReport | None
    encode: Callable[[str], Ids]
    raw_text: Callable[[Ids], str]
    deltas: list[Delta] = field(default_factory=list)
    begun: bool = False
    unwanted: bool = False
    placed: bool = False
    committing: bool = False
    ended: asyncio.Task[Interaction] = field(init=False)
    watchers: list[Callable[[], None]] = field(default_factory=list)
    timeline: Timeline = field(init=False)
    held: list[Delta] = field(default_factory=list)
    _reader: OutputParser = field(init=False)
    _ends: frozenset[int] = field(init=False)
    _takes_whole_chunks: bool = field(init=False)
    _reasoning_tokens: int = 0
    _unsure: int = 0
    _sampler: Sampler | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parser, OutputParser):  # else no token is taken
            self._reader = self.parser
        self._ends = frozenset(self.generate.stop_token_ids)
        self.timeline = self.generate.timeline
        request = self.request
        self._takes_whole_chunks = not request.logprobs and (request.parallel_tool_calls or not request.tools)

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.ids.length

    @property
    def prompt_ids(self) -> Ids:
        return self.prompt.ids.joined

    def cancel(self) -> None:
        """Cancel the turn. A task that has not started yet ends when it starts, so that its end is recorded."""
        self.unwanted = True
        if self.begun:
            self.ended.cancel()

    def answer(self) -> Answer:
        interaction = self.ended.result()
        shown = self.report if interaction.has_logprobs else None
        logprobs = None if shown is None else tuple(shown.entries)
        text = self.raw_text(interaction.output_ids) if self.request.return_completion_text else None
        return Answer(interaction, logprobs, self.prompt_ids if self.request.return_token_ids else None, text)

    def receive(self, deltas: list[Delta]) -> None:
        """Add the next pieces of an external model's answer."""
        assert isinstance(self.parser, GivenAnswer)
        if self.interaction.first_token_at is None:
            self.interaction.first_token_at, self.timeline.first_token = time.time(), time.monotonic()
        self.parser.add(deltas)
        self.publish(deltas)

    def take(self, chunk: TokenChunk) -> FinishReason | None:
        """Add a chunk, cut off after an end token or a complete stop string.

        Returns the reason if sampling ends here, else None. Raises EngineFailed if the chunk corrects the versions of
        more tokens than there are.
        """
        if chunk.text is not None:
            chunk = self._encoded(chunk, chunk.text)
        interaction, ids = self.interaction, chunk.ids
        if not chunk.sampled:
            interaction.trainable = interaction.has_logprobs = False
        if chunk.logprobs_of is not LogprobsOf.RULE:
            interaction.logprobs_of = LogprobsOf.furthest((interaction.logprobs_of, chunk.logprobs_of))
        if chunk.sampler is not self._sampler and chunk.sampler is not None:  # a chunk without tokens has none
            self._note_sampler(chunk.sampler)
        if chunk.cached_tokens is not None:
            interaction.cached_tokens = chunk.cached_tokens
        if chunk.corrected:
            interaction.versions = corrected(interaction.versions, chunk.corrected)
        if chunk.unsure:
            self._unsure += chunk.unsure
            interaction.uncertain = self._unsure > 0
        if self.columns is not None:
            self.columns.add(chunk, self.prompt_tokens + len(interaction.output_ids))
        finish = chunk.finish
        tokens = ids.tolist()  # read several times; an array creates its integers again on each read
        if not self._ends.isdisjoint(tokens):
            ids, finish = _until_end(ids, self._ends), FinishReason.STOP
            tokens = ids.tolist()
        if ids and not interaction.output_ids:
            interaction.first_token_at, self.timeline.first_token = time.time(), time.monotonic()
        if self._takes_whole_chunks:
            return self._add(ids, chunk, 0, self._reader.feed(tokens)) or finish
        return self._take_apart(ids, chunk) or finish

    def _note_sampler(self, sampler: Sampler) -> None:
        """Note which engine server the next tokens come from."""
        self._sampler, interaction = sampler, self.interaction
        start = len(interaction.output_ids)
        if not start:
            interaction.samplers = ((0, sampler),)
        elif interaction.samplers[-1][1] != sampler:
            interaction.samplers += ((start, sampler),)

    def _encoded(self, chunk: TokenChunk, text: str) -> TokenChunk:
        """Return a text chunk as token ids within the budget, with an end token if it finished with `stop`."""
        most, stops = self.generate.sampling.max_tokens, self.generate.stop_token_ids
        ids = self.encode(text)
        if chunk.finish is FinishReason.STOP and stops and not (ids and ids[-1] in stops):
            ids = ids + ids_of(stops[:1])
        finish = FinishReason.LENGTH if most is not None and len(ids) > most else chunk.finish
        ids = ids[:most]
        return TokenChunk(ids, array("f", bytes(4 * len(ids))), chunk.version, finish, sampled=False)

    def _take_apart(self, ids: Ids, chunk: TokenChunk) -> FinishReason | None:
        """Add tokens one by one, to report logprobs or to stop after the first call. A run of text may stay whole."""
        deltas = self._reader.feed_text(ids)
        if deltas is not None:
            return self._add(ids, chunk, 0, deltas)
        for at in range(len(ids)):
            token = ids[at : at + 1]
            finish = self._add(token, chunk, at, self._reader.feed(token))
            if finish is not None:
                return finish
        return None

    def _add(self, ids: Ids, chunk: TokenChunk, at: int, deltas: list[Delta]) -> FinishReason | None:
        """Record and publish `ids`, which start at index `at` of their chunk and were parsed into `deltas`.

        Returns the reason if sampling ends after them, else None.
        """
        parser, interaction, request = self._reader, self.interaction, self.request
        if parser.stop_string is not None:
            ids = ids[: parser.kept - len(interaction.output_ids)]
        interaction.output_ids += ids
        interaction.logprobs += chunk.logprobs[at : at + len(ids)]
        if chunk.unmasked is not None:
            interaction.unmasked_logprobs = interaction.unmasked_logprobs or Logprobs("f")
            interaction.unmasked_logprobs += chunk.unmasked[at : at + len(ids)]
        if ids:
            known = interaction.versions
            interaction.versions = with_run(known, len(ids), chunk.version) if known else ((len(ids), chunk.version),)
        if self.report is not None:
            self._report(self.report, ids, chunk, at)
        if request.per_token and ids:
            deltas = [TokensDelta(ids, () if self.report is None else self.report.unreported()), *deltas]
        if deltas:
            self.publish(deltas)
        if parser.stop_string is not None:
            return FinishReason.STOP_STRING
        if not request.parallel_tool_calls and any(isinstance(delta, ToolCallEnd) for delta in deltas):
            return FinishReason.STOP
        return None

    def _report(self, report: LogprobReport, ids: Ids, chunk: TokenChunk, at: int) -> None:
        """Report the logprobs of tokens outside of the reasoning, or of all tokens if the request has `per_token`.

        Either all `ids` are part of the reasoning, or none.
        """
        before, self._reasoning_tokens = self._reasoning_tokens, self.parser.reasoning_tokens
        if chunk.sampled and (self._reasoning_tokens == before or self.request.per_token):
            most = self.request.top_logprobs  # the engine may report more alternatives, to be recorded
            for index, token in enumerate(ids, at):
                top = chunk.top_logprobs[index][:most] if chunk.top_logprobs else ()
                report.add(token, chunk.logprobs[index], top)

    def prove(self) -> None:
        """Set `aligned` by comparing token ids, and split the prompt. An aligned parent's tokens are not stored again.

        A prompt that was not bridged is never aligned, and all its tokens are stored as the suffix. Only the images of
        the suffix are stored.
        """
        interaction, prompt, parent = self.interaction, self.prompt, self.prompt.match.parent
        aligned = parent is not None and prompt.bridged and self.session.cache.proves(parent, prompt.ids)
        interaction.aligned = aligned
        interaction.prefix_length = parent.length if parent is not None and aligned else 0
        interaction.prompt_suffix = prompt.ids.last if aligned else prompt.ids.joined
        if prompt.images:
            interaction.images = tuple([each for each in prompt.images if each.start >= interaction.prefix_length])

    def side_columns(self) -> Columns:
        """The side columns of the output as it was cut; sets `replay` of the interaction."""
        if self.columns is None:
            return {}
        interaction = self.interaction
        found, interaction.replay = self.columns.taken(
            interaction.prefix_length, self.prompt_tokens, len(interaction.output_ids)
        )
        self.columns = None
        return found

    def drop_columns(self) -> None:
        """Forget the side columns, which are large: they are stored, or the turn failed."""
        self.columns, self.recorded = None, NO_COLUMNS

    def publish(self, deltas: list[Delta]) -> None:
        """Show deltas to readers. Once a tool call is closed, hold them until the commit (`release`).

        A client may execute a call as soon as it is closed, so the commit must be durable first. In some APIs the last
        fragment of the arguments closes a call, so that fragment is also held, as are tokens that end the answer.
        """
        seen = len(self.deltas)
        for delta in deltas if self.report is None else map(self.report.attach, deltas):
            if self.held or (isinstance(delta, _MAY_END) and self._may_end(delta)):
                self._hold(delta)
            else:
                self.deltas.append(delta)
        if len(self.deltas) > seen:
            for wake in self.watchers:
                wake()

    def _hold(self, delta: Delta) -> None:
        """Hold a delta. The next fragment of arguments releases a held fragment, since that was not the last.

        The tokens that came with a fragment are released with it. Once a call is closed, nothing is released before
        the commit.
        """
        if isinstance(delta, ToolCallArguments) and all(
            isinstance(held, ToolCallArguments) or not self._may_end(held) for held in self.held
        ):
            self.deltas += self.held
            self.held.clear()
        self.held.append(delta)

    def _may_end(self, delta: Delta) -> bool:
        """True if a delta may close a call, or has an end token or the tokens of a stop string."""
        if isinstance(delta, TokensDelta):
            return self.parser.stop_string is not None or delta.ids[-1] in self._ends
        return True

    def release(self) -> None:
        """Show the held deltas to readers, after the commit."""
        held, self.held = self.held, []
        if held:
            self.deltas += held
            for wake in self.watchers:
                wake()


def _until_end(ids: Ids, ends: Container[int]) -> Ids:
    """Return `ids` up to and including the first end token. They must have one."""
    return ids[: next(index for index, token in enumerate(ids) if token in ends) + 1]
