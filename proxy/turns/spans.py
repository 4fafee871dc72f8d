"""The span attributes of a request and its turns: ids, sizes and reasons, never the text of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.turns.choice import Choice
from proxy.turns.turn import Turn
from proxy.types import Api, TurnRequest

if TYPE_CHECKING:
    from proxy.telemetry.spans import Trace

_MOST_NAMED = 200
"""The maximum number of characters of the model's name, which the client chooses."""

_OPERATIONS = {Api.COMPLETIONS: "text_completion", Api.GENERATE: "text_completion"}

Attributes = dict[str, Any]


def trace_request(trace: Trace, asked: TurnRequest) -> None:
    """Describe the request in its trace."""
    trace.timeline, trace.describe = asked.timeline, partial(_of_request, asked)
    asked.timeline.trace = trace.context


def trace_turns(trace: Trace, asked: TurnRequest, choices: Sequence[Choice]) -> None:
    """Describe the choices that answer a request in its trace.

    The choices of an earlier request, attached to or replayed by a retry, have their spans in the earlier trace.
    """
    trace.begun, trace.describe = True, partial(_of_reply, asked, choices)
    own = [choice for choice in choices if isinstance(choice, Turn) and choice.request.timeline is asked.timeline]
    for turn in own:
        trace.add_turn(turn.interaction.id, turn.timeline, turn.ended, partial(_of_phases, turn))
    first = choices[0]
    if not own and isinstance(first, Turn) and first.timeline.trace is not None:
        trace.link(first.timeline.trace)


def _of_request(asked: TurnRequest) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(asked.api, "chat"),
        "gen_ai.provider.name": "tokengrove",
        "gen_ai.request.model": asked.model[:_MOST_NAMED],
        "gen_ai.request.stream": asked.stream,
    }
    if asked.n > 1:
        attributes["gen_ai.request.choice.count"] = asked.n
    return attributes


def _of_reply(asked: TurnRequest, choices: Sequence[Choice]) -> Attributes:
    """Return the attributes of a request's span. All its choices must have ended."""
    all_of_them = [choice.interaction for choice in choices]
    first = all_of_them[0]
    finished = [str(i.finish_reason) for i in all_of_them if i.finish_reason is not None]
    attributes: Attributes = {
        **_of_request(asked),
        "gen_ai.response.id": first.id,
        "gen_ai.usage.input_tokens": choices[0].prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(i.output_ids) for i in all_of_them),
        "tokengrove.interaction.id": first.id,
        "tokengrove.reason": str(first.reason),
        "tokengrove.status": str(next((i.status for i in all_of_them if i.status != first.status), first.status)),
    }
    if finished:
        attributes["gen_ai.response.finish_reasons"] = finished
    if first.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = first.cached_tokens
    if reasoning := sum(i.reasoning_tokens for i in all_of_them):
        attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning
    if first.versions:
        attributes["tokengrove.weight_version"] = first.versions[-1][1]
    timeline = asked.timeline
    if asked.stream and timeline.first_token is not None and timeline.received is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = timeline.first_token - timeline.received
    return attributes


def _of_phases(turn: Turn) -> Mapping[str, Attributes]:
    """Return the span attributes of a turn, by phase."""
    interaction = turn.interaction
    generated: Attributes = {
        "tokengrove.interaction.id": interaction.id,
        "gen_ai.usage.output_tokens": len(interaction.output_ids),
        "tokengrove.weight_versions": [version for _, version in interaction.versions],
    }
    if interaction.finish_reason is not None:
        generated["gen_ai.response.finish_reasons"] = [str(interaction.finish_reason)]
    if interaction.cached_tokens is not None:
        generated["gen_ai.usage.cache_read.input_tokens"] = interaction.cached_tokens
    matched: Attributes = {} if interaction.parent_id is None else {"tokengrove.parent.id": interaction.parent_id}
    return {
        "match": matched,
        "render": {"gen_ai.usage.input_tokens": turn.prompt_tokens, "tokengrove.bridged": turn.prompt.bridged},
        "generate": generated,
        "commit": {
            "tokengrove.interaction.id": interaction.id,
            "tokengrove.reason": str(interaction.reason),
            "tokengrove.aligned": interaction.aligned,
        },
    }
