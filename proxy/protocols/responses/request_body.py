"""Writes the body of a responses request: the inverse of `ResponsesProtocol.parse`, as far as this API allows.

The input is the whole conversation, even if the client referred to an earlier response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from proxy.protocols.parts import split
from proxy.protocols.responses.response_object import ECHOED
from proxy.protocols.sampling_params import sampling_json
from proxy.types import INSTRUCTIONS, Message, Role, Tool, ToolChoiceMode, TurnRequest

_WRITTEN_ANEW = ("instructions", "max_output_tokens", "previous_response_id", "tool_choice")


def responses_body(request: TurnRequest) -> dict[str, Any]:
    """A body that requests the same conversation, sampling and form of the reply."""
    messages, body = list(request.messages), dict[str, Any](model=request.model)
    if messages and messages[0].name == INSTRUCTIONS:
        body["instructions"] = messages.pop(0).content
    body["input"] = [item for message in messages for item in _items(message)]
    if request.tools:
        body["tools"] = _tools_json(request.tools, request.echo)
    if request.tool_choice.mode is ToolChoiceMode.NAMED:
        body["tool_choice"] = {"type": "function", "name": request.tool_choice.name}
    elif request.tool_choice.mode is not ToolChoiceMode.AUTO:
        body["tool_choice"] = request.tool_choice.mode.value
    if not request.parallel_tool_calls:
        body["parallel_tool_calls"] = False
    sampling = sampling_json(request.sampling, request.given)
    if (limit := sampling.pop("max_tokens", None)) is not None:
        body["max_output_tokens"] = limit
    body |= sampling
    if request.template_options:
        body["chat_template_kwargs"] = dict(request.template_options)
    return {**body, **_repeated(request), **_reply_json(request)}


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        output = {"type": "function_call_output", "output": _content(message)}
        return [output if message.tool_call_id is None else {**output, "call_id": message.tool_call_id}]
    if message.role is not Role.ASSISTANT:
        return [{"type": "message", "role": message.role.value, "content": _content(message)}]
    items: list[dict[str, Any]] = []
    if message.reasoning:
        text = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [text]})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.tool_calls:
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


def _content(message: Message) -> str | list[dict[str, Any]]:
    if not message.images:
        return message.content
    return [
        {"type": "input_text", "text": part} if isinstance(part, str) else {"type": "input_image", "image_url": part}
        for part in split(message.content, message.images)
    ]


def _tools_json(tools: Sequence[Tool], echo: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools as JSON. Adjacent tools of one namespace are grouped in it."""
    out: list[dict[str, Any]] = []
    namespaces, typed = echo.get("namespaces", {}), echo.get("typed", {})
    for namespace, found in groupby(tools, key=lambda tool: namespaces.get(tool.name)):
        functions = [typed.get(tool.name) or {"type": "function", **tool.to_json()} for tool in found]
        out += functions if namespace is None else [{"type": "namespace", "name": namespace, "tools": functions}]
    return out


def _repeated(request: TurnRequest) -> dict[str, Any]:
    """The fields that the reply repeats, as sent."""
    names = [name for name in ECHOED if name not in _WRITTEN_ANEW]
    return {name: request.echo[name] for name in names if name in request.echo}


def _reply_json(request: TurnRequest) -> dict[str, Any]:
    """The fields that shape the reply and differ from their defaults."""
    fields: dict[str, Any] = {
        "include": request.echo.get("include"),
        "stream": request.stream,
        "top_logprobs": request.top_logprobs,
        "return_token_ids": request.return_token_ids,
        "return_completion_text": request.return_completion_text,
    }
    return {name: value for name, value in fields.items() if value}
