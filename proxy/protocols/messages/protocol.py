"""Parses Anthropic messages requests.

honoured  model messages system max_tokens stop_sequences stream temperature top_p top_k (in both API versions)
          tools (name description input_schema type input_examples, which the description gets; with defer_loading, the
          tool is shown once a tool_reference names it, or at once if a tool search of a provider is requested, which
          nobody runs; of the tools that Anthropic defines and clients run also display_width_px display_height_px
          enable_zoom configs) tool_choice (type name disable_parallel_tool_use) output_config.format output_format (its
          older name) output_config.effort (the template option reasoning_effort), and the engine
          extensions return_token_ids return_completion_text stop_token_ids min_tokens and structured_outputs (json
          json_object regex choice grammar) regex ebnf
          thinking.type: `disabled` sets the template option enable_thinking to false; other types change nothing,
          because template options are part of a tree root's identity and clients vary the rest of the field from turn
          to turn (they vary the effort only if their user does);
          a last message from the assistant (prefill), whose text the answer continues
ignored   cache_control (anywhere) metadata (a hint for the session) context_management (other edits) service_tier speed
          inference_geo diagnostics billing_policy fallbacks fallback_credit_token
          thinking.budget_tokens thinking.display thinking.block_binding tools.strict tools.cache_control
          tools.eager_input_streaming tools.allowed_callers tools.display_number tools.max_characters; betas
          user_profile_id workspace_id (headers); tools that only a provider runs, such as web_search_20250305 (recorded
          as dropped); and every field not named here (top-level ones are recorded as dropped)
refused   mcp_servers container compaction thread output_config.task_budget (a provider tells the model); edits of
          context_management that would change the prompt; vLLM's former guided_json guided_regex guided_choice
          guided_grammar guided_decoding_backend guided_whitespace_pattern; images outside of the user's messages and
          tool results, and all images unless it is a vision model

`accepted_types` has a row for each type of block, source, tool and edit. Other types are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.protocols.answer_format import FORMAT_FIELDS, FORMER_FIELDS, parse_answer_format
from proxy.protocols.common_fields import effort_options, ignored_fields, parse_model
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    expect_text,
    optional_bool,
    optional_object,
    optional_str,
)
from proxy.protocols.hosted_tools import HostedTool
from proxy.protocols.messages.accepted_types import EDITS, SEARCH_TOOLS, TOOLS, Treatment
from proxy.protocols.messages.blocks import parse_system
from proxy.protocols.messages.client_tools import client_tool
from proxy.protocols.messages.conversation import parse_conversation
from proxy.protocols.messages.reply import MessageStream, message_json
from proxy.protocols.messages.request_body import messages_body
from proxy.protocols.messages.toolsets import TOOLSETS, toolset_tools
from proxy.protocols.prefill import take_prefill
from proxy.protocols.sampling_params import parse_sampling_numbers, parse_stop_tokens
from proxy.protocols.tool_inputs import json_text
from proxy.protocols.wire_protocol import Answer, ordered_hex
from proxy.types import (
    Api,
    Ids,
    Message,
    ResponseFormat,
    Role,
    SamplingParams,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

HONOURED = frozenset(
    {
        *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"),
        *("tools", "tools.name", "tools.description", "tools.input_schema", "tools.type", "tools.defer_loading"),
        *("tools.display_width_px", "tools.display_height_px", "tools.enable_zoom", "tools.configs"),
        "tools.input_examples",
        *("tool_choice", "tool_choice.type", "tool_choice.name", "tool_choice.disable_parallel_tool_use"),
        *(
            "output_config",
            "output_config.format",
            "output_config.effort",
            "output_format",
            "thinking",
            "thinking.type",
        ),
        *("return_token_ids", "return_completion_text", "stop_token_ids", "min_tokens"),
        *FORMAT_FIELDS,
    }
)
IGNORED = frozenset(
    {
        *("cache_control", "metadata", "context_management", "service_tier", "speed", "inference_geo", "diagnostics"),
        *("billing_policy", "fallbacks", "fallback_credit_token", "betas", "user_profile_id", "workspace_id"),
        *("thinking.budget_tokens", "thinking.display", "thinking.block_binding"),
        *("tools.strict", "tools.cache_control", "tools.eager_input_streaming"),
        *("tools.allowed_callers", "tools.display_number", "tools.max_characters"),
    }
)
_REFUSED = frozenset({"mcp_servers", "container", "compaction", "thread"})
REFUSED = _REFUSED | FORMER_FIELDS | {"output_config.task_budget"}

# Anthropic's tool runners try a thread first. After this error, they send the whole conversation with every turn.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k")
_USUAL = frozenset(
    {"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"}
)
"""The fields of the usual request without tools."""
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_CHOICES = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "tool": ToolChoiceMode.NAMED,
    "none": ToolChoiceMode.NONE,
}
# The output is searched for each of them at every token; real clients send only a few.
_MAX_STOP_SEQUENCES = 64
_LONGEST_MODEL = 128
"""Characters of the name of a model in an error."""


class MessagesProtocol:
    """Anthropic messages, `/v1/messages`."""

    api = Api.MESSAGES

    def new_id(self) -> str:
        return "msg_" + ordered_hex()

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        if type(body) is not dict:
            body = expect_object(body, "body")
        if body.get("max_tokens") is None:
            raise InvalidRequest("'max_tokens' is missing; the Messages API requires it", param="max_tokens")
        return (_parse_usual if _USUAL.issuperset(body) else _parse)(body, bodies)

    def parse_count(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        """Parse a request of `/v1/messages/count_tokens`, where `max_tokens` and `stream` have no effect."""
        body = expect_object(body, "body")
        return _parse({name: value for name, value in body.items() if name not in ("max_tokens", "stream")}, bodies)

    def body(self, request: TurnRequest) -> dict[str, Any]:
        return messages_body(request)

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return message_json(request, answers[0])

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> MessageStream:
        return MessageStream(request, reply_id, prompt_tokens, prompt_ids)


def _parse_usual(body: Mapping[str, Any], bodies: ParsedBodies | None) -> TurnRequest:
    """Parse a body that has only usual fields, so that the others cost nothing."""
    dropped = list[str]()
    sampling, stream = parse_sampling_numbers(body), body.get("stream")
    if (stop := body.get("stop_sequences")) is not None:
        sampling["stop"] = _parse_stop(expect_list(stop, "stop_sequences"))
    messages, _ = _parse_messages(body, dropped, bodies)
    request = TurnRequest(
        Api.MESSAGES,
        parse_model(body),
        messages,
        sampling=SamplingParams(**sampling),
        given=frozenset(sampling),
        stream=bool(stream) if stream is None or type(stream) is bool else expect_bool(stream, "stream"),
        dropped=tuple(dropped),
    )
    if request.messages[-1].role is Role.ASSISTANT:
        _take_prefill(request, f"messages[{len(body['messages']) - 1}].content")
    return request


def _parse(body: Mapping[str, Any], bodies: ParsedBodies | None) -> TurnRequest:
    if body.get("thread"):
        message = "'thread' is not supported: this server keeps no threads; send the whole conversation in 'messages'"
        raise UnsupportedParameter(message, param="thread", details=_NO_THREADS)
    for name in sorted(_REFUSED & body.keys()):
        if body[name]:
            raise UnsupportedParameter(f"'{name}' is not supported by this server; leave it out", param=name)
    _refuse_edits(body)
    dropped = ignored_fields(body, HONOURED)
    sampling = _parse_sampling(body)
    in_messages = list[str]()
    messages, loaded = _parse_messages(body, in_messages, bodies)
    tools = _parse_tools(body.get("tools"), dropped, loaded)
    choice = optional_object(body, "tool_choice")
    options = _parse_template_options(body, dropped)
    request = TurnRequest(
        api=Api.MESSAGES,
        model=parse_model(body),
        messages=messages,
        tools=tools,
        tool_choice=_parse_tool_choice(choice, tools),
        parallel_tool_calls=not optional_bool(choice, "disable_parallel_tool_use", at="tool_choice."),
        sampling=SamplingParams(**sampling),
        given=frozenset(sampling),
        template_options=options,
        stream=optional_bool(body, "stream"),
        return_token_ids=optional_bool(body, "return_token_ids"),
        return_completion_text=optional_bool(body, "return_completion_text"),
        response_format=parse_answer_format(body, _parse_format(body, dropped)),
        dropped=(*dropped, *in_messages),
        reasoning_fields=_reasoning_fields(body),
        echo={"toolsets": toolsets} if (toolsets := _toolsets_in(body.get("tools") or ())) else {},
    )
    if request.messages[-1].role is Role.ASSISTANT:
        _take_prefill(request, f"messages[{len(body['messages']) - 1}].content")
    return request


def _refuse_edits(body: Mapping[str, Any]) -> None:
    """Raise UnsupportedParameter for a task budget, and for edits of the conversation that would change the prompt."""
    if optional_object(body, "output_config").get("task_budget") is not None:
        message = "'output_config.task_budget' is not supported: the model is told no budget; leave it out"
        raise UnsupportedParameter(message, param="output_config.task_budget")
    edits = optional_object(body, "context_management").get("edits")
    for edit, name in [] if edits is None else _listed(edits, "context_management.edits"):
        kind = edit.get("type")
        row = EDITS.get(kind) if isinstance(kind, str) else None
        if row is None or row.treatment is Treatment.REFUSED:
            model = "".join(parse_model(body).split())[:_LONGEST_MODEL] or "model"
            # Claude Code knows the error by its beginning, and then asks without the edit.
            message = f"{model} does not support the {brief(kind)} context management strategy in '{name}'"
            raise UnsupportedParameter(f"{message}; leave it out, the conversation is shown as it is sent", param=name)


def _take_prefill(request: TurnRequest, name: str) -> None:
    """Continue the last message. As in Anthropic's API, it must not end with white space: models continue it badly."""
    if (text := request.messages[-1].content) != text.rstrip():
        raise InvalidRequest(
            f"'{name}' is the beginning of the answer: final assistant content cannot end with trailing whitespace",
            param=name,
        )
    take_prefill(request, name)


def _parse_messages(
    body: Mapping[str, Any], dropped: list[str], bodies: ParsedBodies | None
) -> tuple[tuple[Message, ...], frozenset[str]]:
    """Return the messages, and the names of the tools that `tool_reference` blocks in them load."""
    if body.get("messages") is None:
        raise InvalidRequest("'messages' is missing", param="messages")
    values = expect_list(body["messages"], "messages")
    if not values:
        raise InvalidRequest("'messages' must hold at least one message", param="messages")
    system = () if body.get("system") is None else parse_system(body["system"], dropped)
    conversation = parse_conversation(values, bodies)
    dropped += conversation.notes.dropped
    if loaded := conversation.notes.loaded:
        _check_loaded(loaded, body.get("tools"))
    return (*system, *conversation.messages), frozenset(name for name, _ in loaded)


def _check_loaded(loaded: Sequence[tuple[str, str]], tools: Any) -> None:
    """Raise InvalidRequest for a reference to a tool that the request does not define."""
    known = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    for name, path in loaded:
        if name not in known:
            raise InvalidRequest(f"'{path}' refers to the tool {brief(name)}, which 'tools' lacks", param=path)


def _parse_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that `body` sets."""
    sampling = parse_sampling_numbers({name: body[name] for name in _SAMPLING if name in body})
    if (value := body.get("stop_sequences")) is not None:
        sampling["stop"] = _parse_stop(expect_list(value, "stop_sequences"))
    if (ids := body.get("stop_token_ids")) is not None:
        sampling["stop_token_ids"] = parse_stop_tokens(ids)
    return sampling


def _parse_stop(values: list[Any]) -> tuple[str, ...]:
    stop = tuple(expect_text(value, f"stop_sequences[{index}]") for index, value in enumerate(values))
    if len(stop) > _MAX_STOP_SEQUENCES:
        message = f"'stop_sequences' has {len(stop)} strings; at most {_MAX_STOP_SEQUENCES} are allowed"
        raise InvalidRequest(message, param="stop_sequences")
    if "" in stop:
        raise InvalidRequest("'stop_sequences' must not hold an empty string", param="stop_sequences")
    return stop


def _parse_tools(value: Any, dropped: list[str], loaded: AbstractSet[str]) -> tuple[Tool, ...]:
    """Return the tools that the client runs and the model is shown. The others are dropped.

    A deferred tool is shown once the conversation loads it. If a provider's tool search would find it, it is shown at
    once, because nobody runs that search here.
    """
    items = [] if value is None else expect_list(value, "tools")
    searched = not SEARCH_TOOLS.isdisjoint(_types_in(items))
    tools: list[Tool] = []
    for index, item in enumerate(items):
        name = f"tools[{index}]"
        tool = expect_object(item, name)
        kind = optional_str(tool, "type", f"{name}.") or "custom"
        deferred = optional_bool(tool, "defer_loading", at=f"{name}.") and not searched
        if tool.get("input_schema") is None and _is_ignored(kind):
            dropped.append(f"{name} of type {kind}" if kind in SEARCH_TOOLS else HostedTool.at(name, kind))
        elif tool.get("input_schema") is None and kind in TOOLSETS:
            tools += toolset_tools(tool, name)
        elif deferred and expect_str(tool.get("name"), f"{name}.name") not in loaded:
            dropped.append(f"{name} with defer_loading")
        else:
            tools.append(_parse_tool(tool, kind, name))
    if len({tool.name for tool in tools}) < len(tools) and _toolsets_in(items):
        _refuse_equal_names(tools)
    return tuple(tools)


def _is_ignored(kind: str) -> bool:
    return (row := TOOLS.get(kind)) is not None and row.treatment is Treatment.IGNORED


def _parse_tool(tool: Mapping[str, Any], kind: str, name: str) -> Tool:
    schema = tool.get("input_schema")
    if schema is None and (known := client_tool(tool, name)) is not None:
        return known
    if kind != "custom" and schema is None:
        accepted = ", ".join(TOOLS)
        message = f"'{name}' has type {brief(kind)}, which is not supported; give a tool with an 'input_schema'"
        raise UnsupportedParameter(f"{message}, or one of the types {accepted}", param=name)
    description = optional_str(tool, "description", f"{name}.") or ""
    if examples := tool.get("input_examples"):
        values = [json_text(one, at) for one, at in _listed(examples, f"{name}.input_examples")]
        description = "\n".join([*([description] if description else []), "Examples of arguments:", *values])
    return Tool(
        name=expect_str(tool.get("name"), f"{name}.name"),
        description=description,
        parameters=expect_object(schema, f"{name}.input_schema"),
    )


def _listed(values: Any, name: str) -> list[tuple[Mapping[str, Any], str]]:
    named = [(value, f"{name}[{index}]") for index, value in enumerate(expect_list(values, name))]
    return [(expect_object(value, at), at) for value, at in named]


def _types_in(items: Sequence[Any]) -> list[str]:
    kinds = [item.get("type") for item in items if isinstance(item, dict)]
    return [kind for kind in kinds if isinstance(kind, str)]


def _toolsets_in(items: Sequence[Any]) -> list[str]:
    """The names of the toolsets in `tools`: the reply names them in their calls."""
    return [TOOLSETS[kind] for kind in _types_in(items) if kind in TOOLSETS]


def _refuse_equal_names(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    twice = next(name for name in names if names.count(name) > 1)
    message = f"'tools' has {brief(twice)} twice: a member of a toolset has this name; rename the other tool"
    raise InvalidRequest(message, param="tools")


def _parse_tool_choice(choice: Mapping[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    if not choice:
        return ToolChoice()
    kind = expect_str(choice.get("type"), "tool_choice.type")
    mode = _CHOICES.get(kind)
    if mode is None:
        message = f"'tool_choice.type' must be one of {', '.join(_CHOICES)}, not {brief(kind)}"
        raise InvalidRequest(message, param="tool_choice.type")
    if mode is ToolChoiceMode.REQUIRED and not tools:
        raise InvalidRequest("'tool_choice' is any, but 'tools' has no tool that can be called", param="tool_choice")
    if mode is not ToolChoiceMode.NAMED:
        return ToolChoice(mode)
    name = expect_str(choice.get("name"), "tool_choice.name")
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(f"'tool_choice' names {brief(name)}, which is not in 'tools'", param="tool_choice.name")
    return ToolChoice(mode, name)


def _parse_template_options(body: Mapping[str, Any], dropped: list[str]) -> dict[str, Any]:
    """Return the template options that `thinking` and `output_config.effort` set."""
    effort = optional_str(optional_object(body, "output_config"), "effort", "output_config.")
    options = {} if effort is None else effort_options(effort)
    thinking = optional_object(body, "thinking")
    if not thinking:
        return options
    kind = thinking.get("type")
    if kind not in _THINKING:
        raise InvalidRequest(f"'thinking.type' must be one of {', '.join(_THINKING)}", param="thinking.type")
    dropped += (f"thinking.{name}" for name in sorted(thinking) if name != "type")
    return {**options, "enable_thinking": False} if kind == "disabled" else options


def _reasoning_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that configure reasoning, as sent."""
    fields = {"thinking": body["thinking"]} if body.get("thinking") else {}
    effort = optional_object(body, "output_config").get("effort")
    return fields if effort is None else {**fields, "output_config": {"effort": effort}}


def _parse_format(body: Mapping[str, Any], dropped: list[str]) -> ResponseFormat | None:
    """Return the JSON schema of `output_config.format`, or of `output_format`, which is its older name."""
    config = optional_object(body, "output_config")
    dropped += (f"output_config.{name}" for name in sorted(config) if name not in ("effort", "format"))
    at, value = "output_config.format", config.get("format")
    if value is None:
        at, value = "output_format", body.get("output_format")
    if value is None:
        return None
    wanted = expect_object(value, at)
    if wanted.get("type") != "json_schema":
        raise InvalidRequest(f"'{at}.type' must be json_schema", param=f"{at}.type")
    return ResponseFormat(expect_object(wanted.get("schema"), f"{at}.schema"), param=at)
