"""Writes the body of a generateContent request: the inverse of `GoogleProtocol.parse`, as far as this API allows.

The model and the form of the reply are in the address (`content_path`).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from proxy.protocols.google.reply import SHOWN_THOUGHTS
from proxy.protocols.parts import split
from proxy.protocols.tool_inputs import input_of
from proxy.types import Message, Role, ToolChoiceMode, TurnRequest

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "seed": "seed",
    "max_tokens": "maxOutputTokens",
}
_MODES = {ToolChoiceMode.NONE: "NONE", ToolChoiceMode.REQUIRED: "ANY", ToolChoiceMode.NAMED: "ANY"}
_LEVELS = frozenset({"minimal", "low", "medium", "high", "xhigh"})
_RESOLUTIONS = {"low": "MEDIA_RESOLUTION_LOW", "high": "MEDIA_RESOLUTION_HIGH"}


def content_path(request: TurnRequest) -> str:
    """The end of the address of a request."""
    method = "streamGenerateContent?alt=sse" if request.stream else "generateContent"
    return f"/v1beta/models/{quote(request.model, safe='')}:{method}"


def google_body(request: TurnRequest) -> dict[str, Any]:
    """A body that requests the same conversation, sampling and form of the reply."""
    messages, body = list(request.messages), dict[str, Any]()
    if messages and messages[0].role is Role.SYSTEM:
        body["systemInstruction"] = {"parts": [{"text": messages.pop(0).content}]}
    body["contents"] = _contents([*messages, *([] if request.prefill is None else [request.prefill])])
    if request.tools:
        declared = [
            {"name": tool.name, "description": tool.description, "parametersJsonSchema": dict(tool.parameters)}
            for tool in request.tools
        ]
        body["tools"] = [{"functionDeclarations": declared}]
    if (choice := request.tool_choice).mode is not ToolChoiceMode.AUTO:
        names = {} if choice.name is None else {"allowedFunctionNames": [choice.name]}
        body["toolConfig"] = {"functionCallingConfig": {"mode": _MODES[choice.mode], **names}}
    if config := _config(request):
        body["generationConfig"] = config
    return {**body, **{name: True for name in ("return_token_ids", "return_completion_text") if getattr(request, name)}}


def _config(request: TurnRequest) -> dict[str, Any]:
    sampling = request.sampling
    shown = {*sampling.to_json(), *request.given}
    values = {name: getattr(sampling, field) for field, name in _SAMPLING.items() if field in shown}
    config = {name: value for name, value in values.items() if value is not None}
    if sampling.stop:
        config["stopSequences"] = list(sampling.stop)
    if request.logprobs:
        config["responseLogprobs"] = True
    if request.top_logprobs:
        config["logprobs"] = request.top_logprobs
    thinking: dict[str, Any] = {"includeThoughts": True} if SHOWN_THOUGHTS in request.echo else {}
    options = request.template_options
    if (level := options.get("reasoning_effort")) in _LEVELS:
        thinking["thinkingLevel"] = str(level).upper()
    if options.get("enable_thinking") is False:
        thinking["thinkingBudget"] = 0
    return {**config, "thinkingConfig": thinking} if thinking else config


def _contents(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages, with results of calls and the user's parts after them in one content, as clients send them."""
    out: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        if message.role is Role.TOOL:
            if not results:
                out.append({"role": "user", "parts": results})
            results.append({"functionResponse": _result(message, names)})
        elif message.role is Role.USER and results:
            results += _parts(message)
            results = []
        else:
            results = []
            names |= {call.id: call.name for call in message.tool_calls}
            out.append(_answer(message) if message.role is Role.ASSISTANT else _other(message))
    return out


def _result(message: Message, names: dict[str, str]) -> dict[str, Any]:
    call_id = message.tool_call_id
    found: dict[str, Any] = {} if call_id is None else {"id": call_id}
    found |= {"name": message.name or names.get(call_id or "", ""), "response": {"result": message.content}}
    return {**found, "parts": [_part(image) for image in message.images]} if message.images else found


def _answer(message: Message) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"text": message.reasoning, "thought": True})
    if message.content or not message.tool_calls:
        parts.append({"text": message.content})
    for call in message.tool_calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": input_of(call.arguments)}})
    return {"role": "model", "parts": parts}


def _other(message: Message) -> dict[str, Any]:
    return {"role": message.role.value, "parts": _parts(message)}


def _parts(message: Message) -> list[dict[str, Any]]:
    return [_part(part) for part in split(message.content, message.images)] or [{"text": ""}]


def _part(part: Any) -> dict[str, Any]:
    """A part: a text, or an image with its resolution."""
    if isinstance(part, str):
        return {"text": part}
    level = _RESOLUTIONS.get(part.detail)
    image: dict[str, Any] = {"inlineData": part}
    return image if level is None else {**image, "mediaResolution": {"level": level}}
