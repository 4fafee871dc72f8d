"""Writes the body of a Messages API request: the inverse of `MessagesProtocol.parse`, as far as this API allows.

The API lacks most sampling parameters and template options; a session may have set them for its turns.
"""

from __future__ import annotations

from typing import Any

from proxy.protocols.parts import split
from proxy.protocols.sampling_params import sampling_json
from proxy.protocols.tool_inputs import input_of
from proxy.types import Message, Role, ToolChoiceMode, TurnRequest

_SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "stop_token_ids")
_CHOICES = {ToolChoiceMode.NONE: "none", ToolChoiceMode.REQUIRED: "any", ToolChoiceMode.NAMED: "tool"}


def messages_body(request: TurnRequest) -> dict[str, Any]:
    """A body that requests the same conversation, sampling and form of the reply."""
    messages, body = list(request.messages), dict[str, Any](model=request.model)
    if messages and messages[0].role is Role.SYSTEM:
        body["system"] = messages.pop(0).content
    body["messages"] = _turns_json([*messages, *([] if request.prefill is None else [request.prefill])])
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
            for tool in request.tools
        ]
    if choice := _choice_json(request):
        body["tool_choice"] = choice
    sampling = sampling_json(request.sampling, request.given)
    body |= {name: sampling[name] for name in _SAMPLING if name in sampling}
    if request.sampling.stop:
        body["stop_sequences"] = list(request.sampling.stop)
    if request.template_options.get("enable_thinking") is False:
        body["thinking"] = {"type": "disabled"}
    if (effort := request.template_options.get("reasoning_effort")) is not None:
        body["output_config"] = {"effort": effort}
    names = ("stream", "return_token_ids", "return_completion_text")
    return {**body, **{name: True for name in names if getattr(request, name)}}


def _choice_json(request: TurnRequest) -> dict[str, Any]:
    choice = request.tool_choice
    alone: dict[str, Any] = {} if request.parallel_tool_calls else {"disable_parallel_tool_use": True}
    if choice.mode is ToolChoiceMode.AUTO:
        return {"type": "auto", **alone} if alone else {}
    named = {} if choice.name is None else {"name": choice.name}
    return {"type": _CHOICES[choice.mode], **named, **alone}


def _turns_json(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages, with tool results and the user's text after them in one message, as this API requires."""
    out: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.TOOL:
            if not results:
                out.append({"role": "user", "content": results})
            results.append(
                {"type": "tool_result", "tool_use_id": message.tool_call_id or "", "content": _content(message)}
            )
        elif message.role is Role.USER and results:
            results += _parts(message)
            results = []
        else:
            results = []
            content = _blocks(message) if message.role is Role.ASSISTANT else _content(message)
            out.append({"role": message.role.value, "content": content})
    return out


def _content(message: Message) -> str | list[dict[str, Any]]:
    return _parts(message) if message.images else message.content


def _parts(message: Message) -> list[dict[str, Any]]:
    """The content as blocks. This API has no detail for images."""
    if not message.images:
        return [{"type": "text", "text": message.content}]
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "source": part._replace(detail="")}
        for part in split(message.content, message.images)
    ]


def _blocks(answer: Message) -> str | list[dict[str, Any]]:
    if not answer.reasoning and not answer.tool_calls:
        return answer.content
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)})
    return blocks
