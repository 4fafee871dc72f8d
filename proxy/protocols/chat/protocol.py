"""OpenAI chat completions <-> types. Pure.

honoured  model messages stream stream_options.include_usage tools tool_choice max_tokens max_completion_tokens stop
          temperature top_p seed presence_penalty frequency_penalty logit_bias parallel_tool_calls reasoning_effort n
          logprobs top_logprobs response_format and the engine extensions top_k min_p repetition_penalty
          chat_template_kwargs (refused by name where the engine cannot)
ignored   user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
          prompt_cache_retention verbosity prediction moderation, and every field not named here (recorded as dropped)
refused   audio, modalities with audio, functions, function_call, web_search_options, image parts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.errors import InvalidRequest, ProxyError, UnsupportedParameter
from proxy.protocols import sse
from proxy.protocols.chat.input_messages import answer_by_order, parse_message
from proxy.protocols.fields import (
    check_text,
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    optional_int,
    optional_object,
    optional_str,
)
from proxy.protocols.sampling_params import parse_sampling
from proxy.protocols.tool_choice import check_tool_choice
from proxy.protocols.wire_protocol import Answer, new_hex, usage_of
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, TokenLogprob, ToolCallArguments, ToolCallStart
from proxy.types import (
    Api,
    FinishReason,
    Interaction,
    Message,
    ResponseFormat,
    SamplingParams,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)

HONOURED = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "stop", "n"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "reasoning_effort", "chat_template_kwargs"),
        *("logprobs", "top_logprobs", "response_format", "modalities"),
    }
)
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "verbosity", "prediction", "moderation"),
    }
)
REFUSED = frozenset({"audio", "functions", "function_call", "web_search_options"})
_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20
_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORT: "stop",
}


class ChatProtocol:
    """`/v1/chat/completions`."""

    api = Api.CHAT

    def new_id(self) -> str:
        return "chatcmpl-" + new_hex()

    def parse(self, body: Any) -> TurnRequest:
        body = expect_object(body, "body")
        _refuse_unsupported(body)
        tools, dropped_tools = _parse_tools(body.get("tools"))
        sampling = parse_sampling(body)
        logprobs, top_logprobs = _parse_logprobs(body)
        return TurnRequest(
            api=Api.CHAT,
            model=_parse_model(body),
            messages=_parse_messages(body),
            tools=tools,
            tool_choice=_parse_tool_choice(body.get("tool_choice"), tools),
            parallel_tool_calls=_optional_bool(body, "parallel_tool_calls", True),
            sampling=SamplingParams(**sampling),
            given=frozenset(sampling),
            template_options=_parse_template_options(body),
            stream=_optional_bool(body, "stream", False),
            include_usage=_parse_include_usage(body),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            n=optional_int(body, "n", least=1, most=_MAX_CHOICES) or 1,
            response_format=parse_response_format(body.get("response_format"), "response_format"),
            dropped=(*sorted(key for key in body if key not in HONOURED), *dropped_tools),
        )

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        first = answers[0].interaction
        return {
            "id": first.id,
            "object": "chat.completion",
            "created": int(first.created_at),
            "model": request.model,
            "choices": [
                {
                    "index": index,
                    "message": _message_json(answer.interaction),
                    "logprobs": None if answer.logprobs is None else _logprobs_json(answer.logprobs),
                    "finish_reason": _finish_reason(answer.interaction),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": _usage_json(answers),
            "system_fingerprint": None,
        }

    def stream(self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int) -> ChatStream:
        return ChatStream(request, reply_id, created)


class ChatStream:
    """One streamed chat completion: `chat.completion.chunk` events of the same id, ended by `[DONE]`."""

    def __init__(self, request: TurnRequest, reply_id: str, created: int) -> None:
        self._include_usage = request.include_usage
        self._choices = request.n
        self._head: dict[str, Any] = {
            "id": reply_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
            "system_fingerprint": None,
        }

    def start(self) -> bytes:
        return b"".join(self._chunk({"role": "assistant", "content": ""}, choice) for choice in range(self._choices))

    def delta(self, delta: Delta, choice: int = 0) -> bytes:
        match delta:
            case TextDelta(text, logprobs):
                return self._chunk({"content": text}, choice, logprobs=_logprobs_json(logprobs) if logprobs else None)
            case ReasoningDelta(text):
                return self._chunk({"reasoning_content": text}, choice)
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                return self._call({"index": index, "id": call_id, "type": "function", "function": function}, choice)
            case ToolCallArguments(index, fragment):
                return self._call({"index": index, "function": {"arguments": fragment}}, choice)
            case _:
                return b""  # chat has no event for the end of a call

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def finish(self, answers: Sequence[Answer]) -> bytes:
        ends = (self._chunk({}, at, _finish_reason(answer.interaction)) for at, answer in enumerate(answers))
        out = b"".join(ends)
        if self._include_usage:
            out += sse.data({**self._head, "choices": [], "usage": _usage_json(answers)})
        return out + sse.DONE

    def error(self, error: ProxyError) -> bytes:
        return sse.data(openai_error(error))

    def _call(self, call: dict[str, Any], choice: int) -> bytes:
        return self._chunk({"tool_calls": [call]}, choice)

    def _chunk(
        self, delta: dict[str, Any], index: int, finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        payload = {**self._head, "choices": [choice]}
        if self._include_usage:
            payload["usage"] = None
        return sse.data(payload)


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def openai_error(error: ProxyError) -> dict[str, Any]:
    """The OpenAI error envelope; chat and responses share it."""
    kind = _ERROR_TYPES.get(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name in sorted(REFUSED):
        if body.get(name):
            raise UnsupportedParameter(f"'{name}' is not supported by this server; leave it out", param=name)
    modalities = body.get("modalities")
    if modalities is not None and "audio" in expect_list(modalities, "modalities"):
        raise UnsupportedParameter("'modalities' with audio is not supported: this gives text", param="modalities")


def _parse_logprobs(body: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether logprobs are asked for, and how many alternatives."""
    wanted = _optional_bool(body, "logprobs", False)
    top = optional_int(body, "top_logprobs", least=0, most=_MAX_TOP_LOGPROBS) or 0
    if top and not wanted:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return wanted, top


def parse_response_format(value: Any, name: str) -> ResponseFormat | None:
    """What `response_format` (or the like in other APIs) asks for; None for text."""
    if value is None:
        return None
    wanted = expect_object(value, name)
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return ResponseFormat()
        case "json_schema":
            holder = expect_object(wanted.get("json_schema", wanted), f"{name}.json_schema")
            return ResponseFormat(expect_object(holder.get("schema"), f"{name}.json_schema.schema"))
        case kind:
            message = f"'{name}.type' must be text, json_object or json_schema, not {kind!r}"
            raise InvalidRequest(message, param=f"{name}.type")


def _parse_model(body: Mapping[str, Any]) -> str:
    if body.get("model") is None:
        raise InvalidRequest("'model' is missing; any name will do, the reply echoes it", param="model")
    return check_text(expect_str(body["model"], "model"), "model")


def _parse_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    if body.get("messages") is None:
        raise InvalidRequest("'messages' is missing", param="messages")
    messages = expect_list(body["messages"], "messages")
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message", param="messages")
    parsed = [parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return tuple(answer_by_order(parsed))


def _optional_bool(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    return default if value is None else expect_bool(value, name)


def _parse_include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    value = expect_object(options, "stream_options").get("include_usage")
    return False if value is None else expect_bool(value, "stream_options.include_usage")


def _parse_template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(optional_object(body, "chat_template_kwargs"))
    if (effort := optional_str(body, "reasoning_effort")) is not None:
        options = {**effort_options(effort), **options}
    return options


def effort_options(effort: str) -> dict[str, Any]:
    """What a reasoning effort says to a template: some read the effort, more of them whether to think at all."""
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _parse_tools(value: Any) -> tuple[tuple[Tool, ...], list[str]]:
    """The function tools, and which of the others are dropped: those that only a provider could run."""
    if value is None:
        return (), []
    tools: list[Tool] = []
    dropped: list[str] = []
    for index, item in enumerate(expect_list(value, "tools")):
        name = f"tools[{index}]"
        tool = expect_object(item, name)
        kind = optional_str(tool, "type", f"{name}.") or "function"
        if kind == "function":
            tools.append(_parse_tool(tool, name))
        else:
            dropped.append(f"{name} of type {kind}")
    return tuple(tools), dropped


def _parse_tool(tool: Mapping[str, Any], name: str) -> Tool:
    function = expect_object(tool.get("function"), f"{name}.function")
    parameters, strict = function.get("parameters"), function.get("strict")
    return Tool(
        name=expect_str(function.get("name"), f"{name}.function.name"),
        description=optional_str(function, "description", f"{name}.function.") or "",
        parameters={} if parameters is None else expect_object(parameters, f"{name}.function.parameters"),
        strict=None if strict is None else expect_bool(strict, f"{name}.function.strict"),
    )


def _parse_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            message = f"'tool_choice' must be auto, none, required or a function, not {value!r}"
            raise InvalidRequest(message, param="tool_choice")
        choice = ToolChoice(ToolChoiceMode(value))
    else:
        function = expect_object(expect_object(value, "tool_choice").get("function"), "tool_choice.function")
        choice = ToolChoice(ToolChoiceMode.NAMED, expect_str(function.get("name"), "tool_choice.function.name"))
    return check_tool_choice(choice, tools)


def _message_json(interaction: Interaction) -> dict[str, Any]:
    output = interaction.output
    message: dict[str, Any] = {"role": "assistant", "content": output.content, "refusal": None}
    if output.tool_calls:
        message["content"] = output.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.tool_calls
        ]
    if output.reasoning is not None:
        message["reasoning_content"] = output.reasoning
    return message


def _finish_reason(interaction: Interaction) -> str:
    assert interaction.finish_reason is not None
    return _FINISH_REASONS[interaction.finish_reason]


def _usage_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """The prompt counts once, however many choices were sampled from it."""
    usages = [usage_of(answer.interaction) for answer in answers]
    prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }


def _logprobs_json(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    entries = [{**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]} for token in tokens]
    return {"content": entries, "refusal": None}


def _token_json(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
