"""Writes the body of a chat completion request: the inverse of `ChatProtocol.parse`, as far as this API allows."""

from __future__ import annotations

from typing import Any

from proxy.protocols.parts import split
from proxy.protocols.sampling_params import sampling_json
from proxy.types import Message, ToolChoiceMode, TurnRequest


def chat_body(request: TurnRequest) -> dict[str, Any]:
    """A body that requests the same conversation, sampling and form of the reply."""
    messages = [message_json(message) for message in request.messages]
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.prefill is not None:
        messages.append(message_json(request.prefill))
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        typed = request.echo.get("typed", {})
        body["tools"] = [
            typed.get(tool.name) or {"type": "function", "function": tool.to_json()} for tool in request.tools
        ]
    if request.tool_choice.mode is ToolChoiceMode.NAMED:
        body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    elif request.tool_choice.mode is not ToolChoiceMode.AUTO:
        body["tool_choice"] = request.tool_choice.mode.value
    if not request.parallel_tool_calls:
        body["parallel_tool_calls"] = False
    body |= sampling_json(request.sampling, request.given)
    if request.template_options:
        body["chat_template_kwargs"] = dict(request.template_options)
    return {**body, **_reply_json(request)}


def message_json(message: Message) -> dict[str, Any]:
    """One message in the form in which clients of this API send it."""
    out: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.images:
        out["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": part}
            for part in split(message.content, message.images)
        ]
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def _reply_json(request: TurnRequest) -> dict[str, Any]:
    """The fields that shape the reply and differ from their defaults."""
    fields: dict[str, Any] = {
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.include_usage else None,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "return_token_ids": request.return_token_ids,
        "return_tokens_as_token_ids": request.names_ids,
        "return_completion_text": request.return_completion_text,
    }
    return {name: value for name, value in fields.items() if value}
