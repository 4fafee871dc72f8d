"""Parses OpenAI responses requests.

honoured  model input instructions tools (also in a namespace and in an item; see `openai_types`) tool_choice (auto
          none required, a tool that the client runs, allowed_tools) parallel_tool_calls max_output_tokens temperature
          top_p text.format reasoning.effort include (reasoning.encrypted_content, message.output_text.logprobs)
          top_logprobs previous_response_id store metadata stream truncation (disabled; auto is recorded as dropped: a
          prompt that is too long is an error, as always), and the engine extensions top_k min_p repetition_penalty
          presence_penalty frequency_penalty logit_bias seed stop include_stop_str_in_output chat_template_kwargs
          return_token_ids return_completion_text stop_token_ids min_tokens structured_outputs (json json_object regex
          choice grammar) regex ebnf (refused by name if the engine does not support them)
ignored   user prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier
          client_metadata stream_options max_tool_calls access_programs background_options context_management image
          moderation, the rest of text, reasoning and include, and every field not named here (recorded as dropped,
          like tools and items that only a provider runs)
refused   background, conversation, prompt; a tool choice that names a hosted tool;
          input other than text or, for a vision model, images; vLLM's former guided_json guided_regex guided_choice
          guided_grammar guided_decoding_backend guided_whitespace_pattern

`store` has no effect except that it is repeated: any response can be continued by its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.protocols.answer_format import FORMAT_FIELDS, FORMER_FIELDS, parse_answer_format, parse_response_format
from proxy.protocols.common_fields import effort_options, ignored_fields, parse_model
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    optional_bool,
    optional_int,
    optional_object,
    optional_str,
    optional_text,
)
from proxy.protocols.hosted_tools import HostedTool
from proxy.protocols.openai_types import TOOLS, Treatment, tool_treatment
from proxy.protocols.responses.client_tools import FUNCTIONS, client_tool
from proxy.protocols.responses.input_items import ParsedInput, parse_input
from proxy.protocols.responses.request_body import responses_body
from proxy.protocols.responses.response_object import (
    ECHOED,
    INCLUDE_LOGPROBS,
    OutputItems,
    response_end,
    response_head,
)
from proxy.protocols.responses.stream import ResponseStream
from proxy.protocols.sampling_params import parse_sampling, parse_sampling_numbers
from proxy.protocols.tool_choice import parse_tool_choice
from proxy.protocols.wire_protocol import Answer, ordered_hex
from proxy.types import INSTRUCTIONS, Api, Ids, Message, ResponseFormat, Role, SamplingParams, Tool, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

HONOURED = frozenset(
    {
        *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text"),
        *("temperature", "top_p", "reasoning", "include", "top_logprobs", "previous_response_id", "store", "metadata"),
        *("stream", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("seed", "stop", "chat_template_kwargs", "return_token_ids", "return_completion_text"),
        *("stop_token_ids", "min_tokens"),
        "include_stop_str_in_output",
        "truncation",
        *FORMAT_FIELDS,
    }
)
IGNORED = frozenset(
    {
        *("user", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "client_metadata", "stream_options", "max_tool_calls", "access_programs", "image"),
        *("background_options", "context_management", "moderation"),
    }
)
REFUSED = frozenset({"background", "conversation", "prompt"}) | FORMER_FIELDS
_MAX_TOP_LOGPROBS = 20
_NO_ITEMS = ParsedInput(())
_USUAL = frozenset(
    {
        *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "store"),
        "previous_response_id",
    }
)
"""The fields of the usual request without tools."""
_ECHOED_USUAL = tuple(name for name in ECHOED if name in _USUAL)
# Ignored fields that the reply repeats if they have the type that clients expect.
_REPEATED: Mapping[str, type] = {"max_tool_calls": int, "safety_identifier": str, "prompt_cache_key": str, "user": str}
# The chat API's names for `max_output_tokens`; in this API they are unknown fields.
_FOREIGN = ("max_tokens", "max_completion_tokens")


class ResponsesProtocol:
    """OpenAI responses, `/v1/responses`."""

    api = Api.RESPONSES

    def new_id(self) -> str:
        return "resp_" + ordered_hex()

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        if type(body) is dict and _USUAL.issuperset(body) and (usual := _parse_usual(body, bodies)) is not None:
            return usual
        body = expect_object(body, "body")
        _refuse_unsupported(body)
        messages, given = _parse_messages(body, bodies)
        tools = parse_tools(body.get("tools"), given)
        shown = tuple(tools.functions.values())
        tool_choice, functions = parse_tool_choice(body.get("tool_choice"), shown, FUNCTIONS)
        sampling = _parse_sampling(body)
        include = _parse_include(body)
        top_logprobs = optional_int(body, "top_logprobs", least=0, most=_MAX_TOP_LOGPROBS) or 0
        return TurnRequest(
            api=Api.RESPONSES,
            model=parse_model(body),
            messages=messages,
            tools=functions,
            tool_choice=tool_choice,
            parallel_tool_calls=optional_bool(body, "parallel_tool_calls", True),
            sampling=SamplingParams(**sampling),
            given=frozenset(sampling),
            template_options=_parse_template_options(body),
            stream=optional_bool(body, "stream", False),
            logprobs=INCLUDE_LOGPROBS in include or top_logprobs > 0,
            top_logprobs=top_logprobs,
            dropped=(*_unhonoured_fields(body), *tools.dropped, *given.dropped),
            previous_id=optional_text(body, "previous_response_id"),
            response_format=parse_answer_format(body, _parse_format(body)),
            return_token_ids=optional_bool(body, "return_token_ids"),
            return_completion_text=optional_bool(body, "return_completion_text"),
            echo={**_parse_echo(body), "include": include, **tools.echo()},
        )

    def body(self, request: TurnRequest) -> dict[str, Any]:
        return responses_body(request)

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        interaction = answer.interaction
        head = response_head(request, interaction.id, int(interaction.created_at), answer.prompt_ids)
        return response_end(head, answer, OutputItems.of(request, interaction.id).all(answer))

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> ResponseStream:
        return ResponseStream(request, reply_id, created, prompt_ids)


def _parse_usual(body: Mapping[str, Any], bodies: ParsedBodies | None) -> TurnRequest | None:
    """Parse a body that has only usual fields, so that the others cost nothing; None if its items have tools."""
    messages, given = _parse_messages(body, bodies)
    if given.tools or given.loaded:
        return None
    sampling = parse_sampling_numbers(body)
    if (limit := optional_int(body, "max_output_tokens", least=1)) is not None:
        sampling["max_tokens"] = limit
    stream, echo = body.get("stream"), dict[str, Any]()
    for name in _ECHOED_USUAL:
        if body.get(name) is not None:
            echo[name] = body[name]
    if type(echo.get("store", True)) is not bool:
        optional_bool(body, "store")
    echo |= {"include": [], "namespaces": {}}
    return TurnRequest(
        Api.RESPONSES,
        parse_model(body),
        messages,
        sampling=SamplingParams(**sampling),
        given=frozenset(sampling),
        stream=bool(stream) if stream is None or type(stream) is bool else expect_bool(stream, "stream"),
        dropped=tuple(given.dropped),
        previous_id=optional_text(body, "previous_response_id") if "previous_response_id" in body else None,
        echo=echo,
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise UnsupportedParameter(f"'{name}' is not supported by this server; leave it out", param=name)
    if optional_bool(body, "background", False):
        raise UnsupportedParameter("'background' is not supported; await the reply or stream it", param="background")
    truncation = optional_str(body, "truncation")
    if truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(f"'truncation' must be auto or disabled, not {brief(truncation)}", param="truncation")


def _unhonoured_fields(body: Mapping[str, Any]) -> list[str]:
    """Return the paths of fields that have no effect, although the reply repeats some of them."""
    ignored = ignored_fields(body, HONOURED | REFUSED)
    if body.get("truncation") == "auto":
        ignored.append("truncation")
    for name, honoured in (("reasoning", "effort"), ("text", "format")):
        if isinstance(value := body.get(name), dict):
            ignored += [f"{name}.{field}" for field in ignored_fields(value, {honoured})]
    return ignored


def _parse_messages(body: Mapping[str, Any], bodies: ParsedBodies | None) -> tuple[tuple[Message, ...], ParsedInput]:
    """Return the instructions, then the input, which may be empty only with `previous_response_id`."""
    given = parse_input([] if body.get("input") is None else body["input"], bodies)
    messages = given.messages
    if not messages and body.get("previous_response_id") is None:
        raise InvalidRequest("'input' must hold at least one message", param="input")
    if "instructions" in body and (instructions := optional_str(body, "instructions")):
        messages = [Message(Role.SYSTEM, instructions, name=INSTRUCTIONS), *messages]
    return tuple(messages), given


def _parse_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    sampling = parse_sampling({name: value for name, value in body.items() if name not in _FOREIGN})
    if (limit := optional_int(body, "max_output_tokens", least=1)) is not None:
        sampling["max_tokens"] = limit
    return sampling


def _parse_include(body: Mapping[str, Any]) -> list[str]:
    items = expect_list([] if body.get("include") is None else body["include"], "include")
    return [expect_str(item, f"include[{index}]") for index, item in enumerate(items)]


def _parse_template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(optional_object(body, "chat_template_kwargs"))
    effort = optional_str(optional_object(body, "reasoning"), "effort", "reasoning.")
    if effort is not None:
        options = {**effort_options(effort), **options}
    return options


def _parse_format(body: Mapping[str, Any]) -> ResponseFormat | None:
    wanted = optional_object(optional_object(body, "text"), "format")
    if wanted.get("type") == "json_schema":
        expect_object(wanted.get("schema"), "text.format.schema")
    return parse_response_format(wanted, "text.format") if wanted else None


def _parse_echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the reply repeats, as sent; absent and null fields are left out."""
    for name in ("metadata", "reasoning", "text"):
        optional_object(body, name)
    optional_bool(body, "store", True)
    given = {name: body[name] for name in ECHOED if body.get(name) is not None}
    for name, kind in _REPEATED.items():
        if name in given and type(given[name]) is not kind:
            del given[name]
    for name in ("reasoning", "text"):
        if name in given:
            given[name] = {**ECHOED[name], **{key: item for key, item in given[name].items() if item is not None}}
    return given


@dataclass(slots=True)
class ToolList:
    """Functions by name, namespaces by function name, and the paths of dropped tools.

    `typed`: the definitions of tools that are no functions, as sent, by the name of their function.
    """

    functions: dict[str, Tool] = field(default_factory=dict)
    namespaces: dict[str, str] = field(default_factory=dict)
    typed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def echo(self) -> dict[str, Any]:
        """Return what the items of the reply need of it (`response_object`)."""
        return {"namespaces": self.namespaces, **({"typed": self.typed} if self.typed else {})}


def parse_tools(value: Any, given: ParsedInput = _NO_ITEMS) -> ToolList:
    """Parse the tools of a request, and those in items of its input. Raises InvalidRequest with the path of the field.

    The model reads the definitions of loaded tools in the result of the search, so they are not among its functions.
    """
    tools = ToolList()
    if value is not None:
        _add_tools(tools, expect_list(value, "tools"), "tools", None)
    for items, at in given.tools:
        _add_tools(tools, items, at, None)
    for items, at in given.loaded:
        loaded = ToolList()
        _add_tools(loaded, items, at, None)
        tools.namespaces = {**loaded.namespaces, **tools.namespaces}
        tools.typed = {**loaded.typed, **tools.typed}
    return tools


def _add_tools(tools: ToolList, items: Sequence[Any], at: str, namespace: str | None) -> None:
    for index, item in enumerate(items):
        name = f"{at}[{index}]"
        tool = expect_object(item, name)
        kind = optional_str(tool, "type", f"{name}.") or "function"
        if kind == "function":
            _add_function(tools, _parse_function(tool, name), name, namespace)
        elif kind == "namespace":
            if namespace is not None:
                raise InvalidRequest(f"'{name}' is a namespace in a namespace; list its tools beside it", param=name)
            inner = expect_list(tool.get("tools"), f"{name}.tools")
            _add_tools(tools, inner, f"{name}.tools", expect_str(tool.get("name"), f"{name}.name"))
        elif tool_treatment(kind, name, TOOLS) is Treatment.HOSTED or (known := client_tool(tool, name)) is None:
            tools.dropped.append(HostedTool.at(name, kind))
        else:
            _add_function(tools, known, name, namespace)
            tools.typed.setdefault(known.name, tool)


def _add_function(tools: ToolList, function: Tool, name: str, namespace: str | None) -> None:
    if (other := tools.functions.get(function.name)) is not None:
        if other != function:
            message = f"'{name}' is another tool named {brief(function.name)}; give each tool a name of its own"
            raise InvalidRequest(message, param=name)
        tools.dropped.append(f"{name} with a name already in use: {function.name}")
        return
    tools.functions[function.name] = function
    if namespace is not None:
        tools.namespaces[function.name] = namespace


def _parse_function(tool: Mapping[str, Any], name: str) -> Tool:
    parameters, strict = tool.get("parameters"), tool.get("strict")
    return Tool(
        name=expect_str(tool.get("name"), f"{name}.name"),
        description=optional_str(tool, "description", f"{name}.") or "",
        parameters={} if parameters is None else expect_object(parameters, f"{name}.parameters"),
        strict=None if strict is None else expect_bool(strict, f"{name}.strict"),
    )
