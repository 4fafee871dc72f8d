"""Parses OpenAI chat completion requests.

honoured  model messages stream stream_options.include_usage tools tool_choice max_tokens max_completion_tokens stop
          temperature top_p seed presence_penalty frequency_penalty logit_bias parallel_tool_calls reasoning_effort n
          logprobs top_logprobs response_format and the engine extensions top_k min_p repetition_penalty
          chat_template_kwargs return_token_ids return_tokens_as_token_ids return_completion_text stop_token_ids
          include_stop_str_in_output min_tokens structured_outputs (json json_object regex choice grammar) regex ebnf
          (refused by name if the engine does not support them);
          continue_final_message: a last message from the assistant (prefill), whose text the answer continues; it
          excludes add_generation_prompt true
ignored   user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
          prompt_cache_retention verbosity prediction moderation, and every field not named here (recorded as dropped)
refused   audio, modalities with audio, functions, function_call, web_search_options; vLLM's former guided_json
          guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern; image parts
          unless it is a vision model (a legacy `function_call` in the history, and the role `function`, are a tool call
          and its result)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.protocols.answer_format import FORMAT_FIELDS, FORMER_FIELDS, parse_answer_format, parse_response_format
from proxy.protocols.chat.input_messages import parse_messages
from proxy.protocols.chat.reply import ChatStream, completion_json
from proxy.protocols.chat.request_body import chat_body
from proxy.protocols.common_fields import effort_options, ignored_fields, parse_include_usage, parse_model
from proxy.protocols.custom_tools import custom_tool
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    optional_bool,
    optional_int,
    optional_object,
    optional_str,
)
from proxy.protocols.hosted_tools import HostedTool
from proxy.protocols.listed_parameters import parse_parameters
from proxy.protocols.openai_types import CHAT_TOOLS, Treatment, tool_treatment
from proxy.protocols.prefill import take_prefill
from proxy.protocols.sampling_params import NUMBERS, parse_sampling, parse_sampling_numbers, parse_stop
from proxy.protocols.tool_choice import parse_tool_choice
from proxy.protocols.wire_protocol import Answer, ordered_hex
from proxy.types import (
    Api,
    Ids,
    Message,
    Role,
    SamplingParams,
    Tool,
    TurnRequest,
)
from tokengrove.errors import InvalidRequest, UnsupportedParameter

HONOURED = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "stop", "n"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "reasoning_effort", "chat_template_kwargs"),
        *("logprobs", "top_logprobs", "response_format", "modalities", "return_token_ids"),
        *("return_tokens_as_token_ids", "return_completion_text", "stop_token_ids", "min_tokens"),
        *("continue_final_message", "add_generation_prompt", "include_stop_str_in_output"),
        *FORMAT_FIELDS,
    }
)
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "verbosity", "prediction", "moderation"),
    }
)
_REFUSED = frozenset({"audio", "functions", "function_call", "web_search_options"})
REFUSED = _REFUSED | FORMER_FIELDS
_USUAL = frozenset({"model", "messages", "stream", "stop", *NUMBERS})
"""The fields of the usual request without tools."""
_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20


class ChatProtocol:
    """OpenAI chat completions, `/v1/chat/completions`."""

    api = Api.CHAT

    def new_id(self) -> str:
        return "chatcmpl-" + ordered_hex()

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        if type(body) is not dict or not _USUAL.issuperset(body):
            return _parse_unusual(expect_object(body, "body"), bodies)
        sampling, stream = parse_sampling_numbers(body), body.get("stream")
        if (stop := body.get("stop")) is not None:
            sampling["stop"] = parse_stop(stop)
        return TurnRequest(
            Api.CHAT,
            parse_model(body),
            _parse_messages(body, bodies),
            sampling=SamplingParams(**sampling),
            given=frozenset(sampling),
            stream=bool(stream) if stream is None or type(stream) is bool else expect_bool(stream, "stream"),
        )

    def body(self, request: TurnRequest) -> dict[str, Any]:
        return chat_body(request)

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return completion_json(request, answers)

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> ChatStream:
        return ChatStream(request, reply_id, created, prompt_ids)


def _parse_unusual(body: Mapping[str, Any], bodies: ParsedBodies | None) -> TurnRequest:
    """Parse a body that has other fields than the usual ones, each of which is a call or more."""
    _refuse_unsupported(body)
    functions, dropped_tools = parse_tools(body.get("tools"))
    tool_choice, tools = parse_tool_choice(body.get("tool_choice"), functions)
    sampling = parse_sampling(body)
    logprobs, top_logprobs = _parse_logprobs(body)
    return_token_ids = optional_bool(body, "return_token_ids")
    names_ids = optional_bool(body, "return_tokens_as_token_ids") and logprobs
    request = TurnRequest(
        api=Api.CHAT,
        model=parse_model(body),
        messages=_parse_messages(body, bodies),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=optional_bool(body, "parallel_tool_calls", True),
        sampling=SamplingParams(**sampling),
        given=frozenset(sampling),
        template_options=_parse_template_options(body),
        stream=optional_bool(body, "stream", False),
        include_usage=parse_include_usage(body),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        n=optional_int(body, "n", least=1, most=_MAX_CHOICES) or 1,
        response_format=parse_answer_format(
            body, parse_response_format(body.get("response_format"), "response_format")
        ),
        dropped=(*ignored_fields(body, HONOURED), *dropped_tools),
        return_token_ids=return_token_ids,
        return_completion_text=optional_bool(body, "return_completion_text"),
        per_token=return_token_ids or names_ids,
        names_ids=names_ids,
        echo=_custom_definitions(body.get("tools")),
    )
    if "continue_final_message" in body or "add_generation_prompt" in body:
        _take_prefill(request, body)
    return request


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    if not _REFUSED.isdisjoint(body):
        for name in sorted(_REFUSED & body.keys()):
            if body[name]:
                raise UnsupportedParameter(f"'{name}' is not supported by this server; leave it out", param=name)
    modalities = body.get("modalities")
    if modalities is not None and "audio" in expect_list(modalities, "modalities"):
        raise UnsupportedParameter(
            "'modalities' with audio is not supported; this server answers with text", param="modalities"
        )


def _parse_logprobs(body: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether logprobs are requested, and the number of alternatives per token."""
    wanted = optional_bool(body, "logprobs", False)
    top = optional_int(body, "top_logprobs", least=0, most=_MAX_TOP_LOGPROBS) or 0
    if top and not wanted:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return wanted, top


def _parse_messages(body: Mapping[str, Any], bodies: ParsedBodies | None) -> tuple[Message, ...]:
    if body.get("messages") is None:
        raise InvalidRequest("'messages' is missing", param="messages")
    messages = body["messages"]
    if type(messages) is not list:
        messages = expect_list(messages, "messages")
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message", param="messages")
    return parse_messages(messages, bodies)


def _take_prefill(request: TurnRequest, body: Mapping[str, Any]) -> None:
    """Continue the last message if the body requests it, with the fields of vLLM and SGLang."""
    wanted = optional_bool(body, "continue_final_message")
    if optional_bool(body, "add_generation_prompt", not wanted) == wanted:
        raise InvalidRequest(
            "give both 'continue_final_message': true and 'add_generation_prompt': false to continue the last message, "
            "or neither to begin an answer",
            param="add_generation_prompt",
        )
    if wanted and request.messages[-1].role is not Role.ASSISTANT:
        raise InvalidRequest(
            "'continue_final_message' needs a last message from the assistant", param="continue_final_message"
        )
    if wanted:
        take_prefill(request, f"messages[{len(request.messages) - 1}]")


def _parse_template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(optional_object(body, "chat_template_kwargs"))
    if (effort := optional_str(body, "reasoning_effort")) is not None:
        options = {**effort_options(effort), **options}
    return options


def parse_tools(value: Any) -> tuple[tuple[Tool, ...], list[str]]:
    """Return the functions and custom tools, and the paths of dropped tools, which only a provider can run."""
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
        elif kind == "custom":
            tools.append(custom_tool(expect_object(tool.get("custom"), f"{name}.custom"), f"{name}.custom"))
        elif tool_treatment(kind, name, CHAT_TOOLS) is Treatment.HOSTED:
            dropped.append(HostedTool.at(name, kind))
    return tuple(tools), dropped


def _custom_definitions(value: Any) -> dict[str, Any]:
    """Return `typed`: the definitions of the custom tools of a parsed request, as sent, by name; empty without any."""
    tools = [item for item in value or () if item.get("type") == "custom"]
    return {"typed": {tool["custom"]["name"]: tool for tool in tools}} if tools else {}


def _parse_tool(tool: Mapping[str, Any], name: str) -> Tool:
    function = expect_object(tool.get("function"), f"{name}.function")
    strict = function.get("strict")
    return Tool(
        name=expect_str(function.get("name"), f"{name}.function.name"),
        description=optional_str(function, "description", f"{name}.function.") or "",
        parameters=parse_parameters(function.get("parameters"), f"{name}.function.parameters"),
        strict=None if strict is None else expect_bool(strict, f"{name}.function.strict"),
    )
