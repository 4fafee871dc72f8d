"""Replays: a committed reply is sent again from its stored tokens. Nothing is sampled or recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field

from proxy.protocols.wire_protocol import Answer
from proxy.rendering import OutputParser
from proxy.rendering.deltas import Delta, TokensDelta
from proxy.rendering.renderer import Renderer
from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.trajectory.tree import token_ids
from proxy.turns.defaults import stop_tokens
from proxy.turns.given_answer import deltas_of
from proxy.turns.logprob_report import LogprobReport, new_report
from proxy.turns.plan import new_parser
from proxy.types import Ids, Interaction, TurnRequest

# Tokens that are parsed together and sent to a streaming client in one event.
_RUN = 32
_DELTAS_A_PART = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayedTurn:
    """A `Choice` that is already committed. `deltas`: its whole output."""

    interaction: Interaction
    attempt: Attempt
    prompt_ids: Ids
    deltas: list[Delta]
    result: Answer
    ended: asyncio.Future[Interaction]
    watchers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return self.interaction.prompt_tokens

    def answer(self) -> Answer:
        return self.result


async def replay(
    renderer: Renderer | None,
    session: LiveSession,
    request: TurnRequest,
    attempt: Attempt,
    interaction: Interaction,
    yield_to_others: Callable[[], Awaitable[None]],
) -> ReplayedTurn:
    """Parse the tokens of a committed interaction again, to answer a request that repeats the original request.

    `renderer`: None for an external model. `yield_to_others` is awaited between parts of the work.
    """
    prompt = token_ids(session.cache.nodes[interaction.id])[: interaction.prompt_tokens]
    parts = _parse(renderer, request, interaction, prompt)
    try:
        while True:
            next(parts)
            await yield_to_others()
    except StopIteration as end:
        deltas, result = end.value
    ended: asyncio.Future[Interaction] = asyncio.get_running_loop().create_future()
    ended.set_result(interaction)
    return ReplayedTurn(
        interaction=interaction, attempt=attempt, prompt_ids=prompt, deltas=deltas, result=result, ended=ended
    )


def parse_again(
    renderer: Renderer | None, request: TurnRequest, interaction: Interaction, prompt: Ids
) -> tuple[list[Delta], Answer]:
    """Return the whole output of a committed interaction in the form that `request` selects.

    `renderer`: None for an external model. `prompt`: the ids of the interaction's prompt. Logprobs have no alternatives
    per token, which are not stored.
    """
    parts = _parse(renderer, request, interaction, prompt)
    try:
        while True:
            next(parts)
    except StopIteration as end:
        parsed: tuple[list[Delta], Answer] = end.value
        return parsed


def _parse(
    renderer: Renderer | None, request: TurnRequest, interaction: Interaction, prompt: Ids
) -> Generator[None, None, tuple[list[Delta], Answer]]:
    """Do the work of `parse_again` in parts of some hundred tokens, if it is done token by token."""
    if renderer is None:
        return [*deltas_of(interaction.sampled_output)], Answer(interaction)
    call_ids = iter([call.id for call in interaction.output.tool_calls])  # the recorded ids are used again
    parser = new_parser(renderer, request, interaction.sampling, prompt, lambda: next(call_ids, ""))
    report = new_report(request, stop_tokens(request, renderer.stop_token_ids), renderer.piece)
    shown = request.logprobs and interaction.has_logprobs
    deltas: list[Delta] = []
    if shown or request.per_token:
        for number, delta in enumerate(_token_by_token(parser, report, interaction, request, shown), 1):
            deltas.append(delta)
            if number % _DELTAS_A_PART == 0:
                yield
    else:
        deltas += parser.feed(interaction.output_ids)
    deltas += map(report.attach, parser.finish())
    prompt_ids = prompt if request.return_token_ids else None
    text = renderer.raw_text(interaction.output_ids) if request.return_completion_text else None
    return deltas, Answer(interaction, tuple(report.entries) if shown else None, prompt_ids, text)


def _token_by_token(
    parser: OutputParser, report: LogprobReport, interaction: Interaction, request: TurnRequest, shown: bool
) -> Iterator[Delta]:
    """Parse the output in runs of text, and in single tokens between them.

    A run is either entirely reasoning or not reasoning at all. `shown`: report the logprobs of the tokens.
    """
    ids, at = interaction.output_ids, 0
    while at < len(ids):
        run, reasoning_tokens = ids[at : at + _RUN], parser.reasoning_tokens
        parsed = parser.feed_text(run)
        if parsed is None:
            run = run[:1]
            parsed = parser.feed(run)
        if shown and (request.per_token or parser.reasoning_tokens == reasoning_tokens):
            for token, logprob in zip(run, interaction.logprobs[at : at + len(run)], strict=True):
                report.add(token, logprob)
        if request.per_token:
            yield TokensDelta(run, report.unreported())
        yield from map(report.attach, parsed)
        at += len(run)
