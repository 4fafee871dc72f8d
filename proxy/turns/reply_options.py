"""The reply options of a request: every option besides conversation and sampling that shapes its reply.

They are stored with the turn, so that the reply can be written again.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.types import Api, Interaction, Json, Message, Tool, ToolChoice, ToolChoiceMode, TurnRequest

_DEFAULTS = TurnRequest(Api.CHAT, "", ())
_NAMES = (
    *("stream", "include_usage", "logprobs", "top_logprobs", "n", "parallel_tool_calls", "previous_id"),
    *("return_token_ids", "return_completion_text", "per_token", "names_ids", "tool_parser"),
)
_KEPT = tuple((name, getattr(_DEFAULTS, name)) for name in _NAMES)
_INSTRUCTIONS = "instructions"


def reply_options_of(request: TurnRequest) -> dict[str, Json]:
    """Return the fields of `request` that shape its reply and differ from their defaults, as JSON.

    Instructions that begin the conversation are stored as true instead of as text, which would be stored twice.
    """
    asked: dict[str, Json] = {}
    for name, default in _KEPT:
        if (value := getattr(request, name)) != default:
            asked[name] = value
    if request.tool_choice.mode is not ToolChoiceMode.AUTO:
        asked["tool_choice"] = [request.tool_choice.mode.value, request.tool_choice.name]
    if request.echo:
        echo, first = dict(request.echo), request.messages[0] if request.messages else None
        if first is not None and echo.get(_INSTRUCTIONS) == first.content:
            echo[_INSTRUCTIONS] = True
        asked["echo"] = echo
    return asked


def request_of(turn: Interaction, messages: Sequence[Message], tools: tuple[Tool, ...]) -> TurnRequest:
    """Return a request for the reply of `turn`. `messages` and `tools`: the conversation of the turn."""
    fields = dict(turn.asked)
    if "tool_choice" in fields:
        mode, name = fields["tool_choice"]
        fields["tool_choice"] = ToolChoice(ToolChoiceMode(mode), name)
    if (echo := fields.get("echo", {})).get(_INSTRUCTIONS) is True:
        fields["echo"] = {**echo, _INSTRUCTIONS: messages[0].content}
    if turn.prefill:
        fields["prefill"] = turn.output._replace(content=turn.output.content[: turn.prefill], tool_calls=())
    return TurnRequest(turn.api, turn.model, tuple(messages), tools, sampling=turn.sampling, route=turn.route, **fields)
