"""Writes a request of any API as the body of a request to an external model.

The protocols write bodies from which this server would parse the same request. Here, everything that only this server
knows is taken out, and what the external model's API cannot express is refused by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn
from urllib.parse import urlsplit

from proxy.images.data_urls import data_url
from proxy.images.image_pool import ReadImages
from proxy.models.declared import Upstream
from proxy.protocols.answer_format import format_fields
from proxy.protocols.chat.request_body import chat_body
from proxy.protocols.image_sources import with_data, written_images
from proxy.protocols.messages.request_body import messages_body
from proxy.protocols.responses.request_body import responses_body
from proxy.types import TOKENS, Api, ImageFile, Message, Role, SamplingParams, Tool, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.options.model import UpstreamApi

DEFAULT_MAX_TOKENS = 4096
"""`max_tokens` of a Messages API request without one: the API requires it, and all of its models take this one."""

_ONLY_COMPLETION_TOKENS = ("api.openai.com", ".openai.azure.com")
"""Hosts whose newer models refuse `max_tokens`. Other servers may ignore its successor, `max_completion_tokens`."""

_EVERYWHERE = frozenset({"temperature", "top_p", "max_tokens"})
_SAMPLING = {
    UpstreamApi.CHAT: _EVERYWHERE | {"presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop"},
    UpstreamApi.RESPONSES: _EVERYWHERE,
    UpstreamApi.MESSAGES: _EVERYWHERE | {"top_k", "stop"},
}
_DEFAULTS = SamplingParams()
_SEQUENCES = {(Api.MESSAGES, "stop"): "stop_sequences", (Api.GOOGLE, "stop"): "generationConfig.stopSequences"}
_PREFILLS = {Api.CHAT: "continue_final_message", Api.GOOGLE: "contents"}
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
_NAMES = {UpstreamApi.CHAT: "chat completions", UpstreamApi.RESPONSES: "responses", UpstreamApi.MESSAGES: "messages"}


def upstream_body(request: TurnRequest, sampling: SamplingParams, upstream: Upstream) -> dict[str, Any]:
    """Return the body of a streamed request. Its images are `ImagePart`s, which `with_images` replaces.

    `request` has its whole conversation. `sampling`: its parameters, with the session's. Raises UnsupportedParameter
    for anything that the external model's API cannot express.
    """
    _refuse(request, upstream.api)
    effort = _effort(request)
    asked = replace(
        request,
        model=upstream.model,
        messages=tuple(message._replace(reasoning=None) for message in request.messages),
        prefill=None if request.prefill is None else request.prefill._replace(reasoning=None),
        tools=tuple(map(_with_parameters, request.tools)),
        echo={name: value for name, value in request.echo.items() if name != "typed"},  # all are functions
        sampling=_taken(request, sampling, upstream.api),
        given=request.given & _SAMPLING[upstream.api] - {"top_k"},
        template_options={},
        stream=True,
        include_usage=True,
    )
    write = {UpstreamApi.CHAT: _chat, UpstreamApi.RESPONSES: _responses, UpstreamApi.MESSAGES: _messages}[upstream.api]
    body = write(asked, effort, upstream)
    if "temperature" not in request.given and sampling.temperature == _DEFAULTS.temperature:
        del body["temperature"]  # some models refuse any
    if not request.tools:  # these fields have no effect without tools, and are refused
        body.pop("tool_choice", None)
        body.pop("parallel_tool_calls", None)
    return body


async def with_images(body: dict[str, Any], files: Mapping[str, ImageFile], read: ReadImages) -> dict[str, Any]:
    """Return a body with its images as base64 text. `files`: those at hand, by digest; the others are read.

    Raises InvalidRequest for an image that does not exist.
    """
    digests = {image.digest for image in written_images(body)}
    if not digests:
        return body
    found = {digest: files[digest] for digest in digests if digest in files}
    if missing := sorted(digests - found.keys()):
        found |= {file.digest: file for file in await read(missing)}
    if lost := sorted(digests - found.keys()):
        raise InvalidRequest(f"the image {lost[0]} is not stored; send it again", param="messages")
    written: dict[str, Any] = await asyncio.to_thread(with_data, body, cache(lambda digest: data_url(found[digest])))
    return written


def _chat(request: TurnRequest, effort: str | None, upstream: Upstream) -> dict[str, Any]:
    body = chat_body(request)
    if "max_tokens" in body and (urlsplit(upstream.url).hostname or "").endswith(_ONLY_COMPLETION_TOKENS):
        body["max_completion_tokens"] = body.pop("max_tokens")
    if request.response_format is not None:
        body |= format_fields(request.response_format)
    return body if effort is None else {**body, "reasoning_effort": effort}


def _responses(request: TurnRequest, effort: str | None, upstream: Upstream) -> dict[str, Any]:
    """The body. A request of the same API keeps its own fields; of another, it does not let the server store it."""
    own = request.echo if request.api is Api.RESPONSES else {}
    echo = {name: value for name, value in own.items() if name != "include"}
    if isinstance(reasoning := echo.pop("reasoning", None), dict):
        reasoning = {name: value for name, value in reasoning.items() if value is not None}
    if request.response_format is not None and not request.response_format.param.startswith("text."):
        wanted = format_fields(request.response_format)["response_format"]
        echo["text"] = {**echo.get("text", {}), "format": {"type": wanted["type"], **wanted.get("json_schema", {})}}
    body = responses_body(replace(request, echo={"store": False, **echo}))
    for item in body["input"]:
        _complete(item)
    if effort is not None:
        reasoning = {**(reasoning or {}), "effort": effort}
    if request.api is not Api.RESPONSES:  # in this API a tool without `strict` is strict, in the others it is not
        for tool in body.get("tools", ()):
            tool.setdefault("strict", False)
    return {**body, "reasoning": reasoning} if reasoning else body


def _complete(item: dict[str, Any]) -> None:
    """Write an input item as the API requires it of a client that does not refer to items by their ids."""
    if item.get("role") == Role.ASSISTANT:
        item["content"] = "".join(part["text"] for part in item["content"])
    for parts in (item.get("content"), item.get("output")):
        if isinstance(parts, list):
            parts[:] = [{**part, "detail": "auto"} if part["type"] == "input_image" else part for part in parts]


def _messages(request: TurnRequest, effort: str | None, upstream: Upstream) -> dict[str, Any]:
    """The body. Answers without text and calls, such as reasoning that was cut off, are left out: they are refused."""
    messages = [message for message in request.messages if not _is_empty_answer(message)]
    system = 0
    while system < len(messages) and messages[system].role is Role.SYSTEM:
        system += 1
    body = messages_body(replace(request, messages=tuple(messages[system:])))
    if system:
        texts = [message.content for message in messages[:system]]
        body["system"] = texts[0] if system == 1 else [{"type": "text", "text": text} for text in texts]
    body.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    for tool, told in zip(request.tools, body.get("tools", ()), strict=bool(request.tools)):
        if tool.strict is not None:
            told["strict"] = tool.strict
    if body.get("tool_choice", {}).get("type") == "none":
        body["tool_choice"] = {"type": "none"}
    if thinking := request.reasoning_fields.get("thinking"):
        body["thinking"] = thinking
    elif effort == "none":
        body["thinking"] = {"type": "disabled"}
    output = dict(request.reasoning_fields.get("output_config", {}))
    if not output and effort not in (None, "none"):
        output["effort"] = effort
    if request.response_format is not None:
        output["format"] = {"type": "json_schema", "schema": request.response_format.schema}
    return {**body, "output_config": output} if output else body


def _is_empty_answer(message: Message) -> bool:
    return message.role is Role.ASSISTANT and not (message.content or message.tool_calls or message.images)


def _with_parameters(tool: Tool) -> Tool:
    """A tool without parameters takes no arguments; providers want a schema that says so."""
    return tool if tool.parameters else replace(tool, parameters=_ANY_ARGUMENTS)


def _effort(request: TurnRequest) -> str | None:
    """The reasoning effort. The template options that it sets have no other meaning for an external model."""
    options = dict(request.template_options)
    effort, thinking = options.pop("reasoning_effort", None), options.pop("enable_thinking", None)
    if options or thinking or not (effort is None or isinstance(effort, str)):
        name = next(iter(options), "reasoning_effort" if thinking is None else "enable_thinking")
        message = f"'chat_template_kwargs.{name}' is not supported by this model, which has no chat template here"
        raise UnsupportedParameter(f"{message}; leave it out", param="chat_template_kwargs")
    return "none" if thinking is False else effort


def _taken(request: TurnRequest, sampling: SamplingParams, api: UpstreamApi) -> SamplingParams:
    """The sampling parameters, without those that mean the same as their default. Raises UnsupportedParameter."""
    off = {name for name, value in (("top_k", -1), ("stop_token_ids", ())) if getattr(sampling, name) == value}
    sampling = sampling._replace(**{name: getattr(_DEFAULTS, name) for name in off})
    for name, value, default in zip(sampling._fields, sampling, _DEFAULTS, strict=True):
        if value != default and name not in _SAMPLING[api]:
            _unsupported(_SEQUENCES.get((request.api, name), name), api)
    return sampling


def _refuse(request: TurnRequest, api: UpstreamApi) -> None:
    """Raise UnsupportedParameter for a prompt or a form of the reply that no answer of this API can have."""
    if request.input_ids is not None or request.text is not None:
        name = "input_ids" if request.api is Api.GENERATE else "prompt"
        _unsupported(name, api, "send 'messages' to a chat API instead")
    for index, message in enumerate(request.messages):
        if message.role is Role.USER and (message.name or "").startswith(TOKENS):
            _unsupported(f"messages[{index}]", api, "it is sent as token ids; send its text")
    if request.n > 1:
        _unsupported("n", api)
    for name in ("return_token_ids", "return_completion_text", "logprobs", "top_logprobs"):
        if getattr(request, name):
            _unsupported(name, api)
    if request.per_token:
        _unsupported("return_tokens_as_token_ids", api)
    if request.prefill is not None and api is not UpstreamApi.MESSAGES:
        name = _PREFILLS.get(request.api, "messages")
        _unsupported(name, api, "it cannot continue an answer; end the messages with one of the user or of a tool")
    for index, tool in enumerate(request.tools):
        if tool.pattern is not None:
            _unsupported(f"tools[{index}].format", api)
    wanted = request.response_format
    if wanted is not None:
        grammar = wanted.regex is not None or wanted.ebnf is not None or wanted.choices
        if grammar or (wanted.schema is None and api is UpstreamApi.MESSAGES):
            _unsupported(wanted.param, api, "give a JSON schema")


def _unsupported(name: str, api: UpstreamApi, instead: str = "leave it out") -> NoReturn:
    message = f"'{name}' is not supported by this model, whose API is that of {_NAMES[api]}; {instead}"
    raise UnsupportedParameter(message, param=name)
