"""Chat bodies: fields that have several spellings or set the same thing."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.protocols.chat.protocol import ChatProtocol
from proxy.types import Message, Role, ToolChoice, ToolChoiceMode, TurnRequest
from tokengrove.errors import InvalidRequest


def parsed(*answers: dict[str, Any], **fields: Any) -> TurnRequest:
    """Parse a body whose last messages are these answers."""
    messages = [{"role": "user", "content": "hi"}, *({"role": "assistant", **answer} for answer in answers)]
    return ChatProtocol().parse({"model": "m", "messages": messages, **fields})


@pytest.mark.parametrize(
    "spelled",
    [
        {"reasoning_content": "hm so"},
        {"reasoning": "hm so"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm "}, {"text": None}, {"text": "so"}]},
    ],
)
def test_reasoning_is_read_under_each_name_that_clients_give_it(spelled: dict[str, Any]) -> None:
    assert parsed({"content": "Yes.", **spelled}).messages[-1].reasoning == "hm so"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm so", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm "}, {"type": "text", "text": "so"}]},
        {"type": "reasoning", "text": "hm so"},
        {"type": "reasoning", "reasoning": "hm so"},
    ],
)
def test_reasoning_is_read_out_of_the_parts_of_an_answer(part: dict[str, Any]) -> None:
    parts = [part, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}]
    answer = parsed({"content": parts}).messages[-1]
    assert (answer.content, answer.reasoning) == ("Yes.", "hm so")


def test_thinking_of_others_is_refused_and_so_is_a_thought_that_is_no_text() -> None:
    with pytest.raises(InvalidRequest):
        ChatProtocol().parse({"model": "m", "messages": [{"role": "user", "content": [{"type": "thinking"}]}]})
    with pytest.raises(InvalidRequest) as raised:
        parsed({"content": [{"type": "thinking", "thinking": 5}]})
    assert raised.value.param == "messages[1].content[0].thinking"
    with pytest.raises(InvalidRequest) as raised:
        parsed({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "image_url"}]})
    assert raised.value.param == "messages[1].content[1]"


@pytest.mark.parametrize(("one", "other"), [(3, 8), (8, 3)])
def test_of_two_limits_of_new_tokens_the_smaller_holds(one: int, other: int) -> None:
    assert parsed(max_tokens=one, max_completion_tokens=other).sampling.max_tokens == 3


def test_template_options_win_over_the_reasoning_effort() -> None:
    assert parsed(reasoning_effort="high").template_options["reasoning_effort"] == "high"
    given = {"reasoning_effort": "low"}
    assert parsed(reasoning_effort="high", chat_template_kwargs=given).template_options["reasoning_effort"] == "low"


WEATHER, MORE = ({"type": "function", "function": {"name": name}} for name in ("weather", "more"))


def _allowed(mode: str, *names: str, flat: bool = False) -> dict[str, Any]:
    tools = [{"type": "function", **({"name": name} if flat else {"function": {"name": name}})} for name in names]
    listed = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools", **(listed if flat else {"allowed_tools": listed})}


@pytest.mark.parametrize("flat", [False, True])
def test_the_tool_choice_may_list_the_allowed_tools_nested_or_flat(flat: bool) -> None:
    for value, choice, names in [
        (_allowed("auto", "more", flat=flat), ToolChoice(), ["more"]),
        (_allowed("required", "more", flat=flat), ToolChoice(ToolChoiceMode.NAMED, "more"), ["weather", "more"]),
        (_allowed("required", "more", "weather", flat=flat), ToolChoice(ToolChoiceMode.REQUIRED), ["weather", "more"]),
    ]:
        request = parsed(tools=[WEATHER, MORE], tool_choice=value)
        assert (request.tool_choice, [tool.name for tool in request.tools]) == (choice, names)


@pytest.mark.parametrize("mode", ["auto", "none", "required"])
def test_a_tool_choice_is_a_mode_or_an_object_with_it(mode: str) -> None:
    choices = [parsed(tools=[WEATHER], tool_choice=value).tool_choice for value in (mode, {"type": mode})]
    assert choices == [ToolChoice(ToolChoiceMode(mode))] * 2


@pytest.mark.parametrize(
    "value",
    [
        {"type": "function", "function": {"name": "more"}},
        {"type": "function", "name": "more"},
        {"function": {"name": "more"}},
    ],
)
def test_a_tool_choice_names_a_function_nested_or_flat(value: Any) -> None:
    assert parsed(tools=[WEATHER, MORE], tool_choice=value).tool_choice == ToolChoice(ToolChoiceMode.NAMED, "more")


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("any", "tool_choice"),
        ({}, "tool_choice.name"),
        ({"type": "function", "name": 5}, "tool_choice.name"),
        ({"type": "function", "name": "unknown"}, "tool_choice"),
        ({"type": "custom", "custom": {"name": "unknown"}}, "tool_choice"),
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": []}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}, "tool_choice.allowed_tools.mode"),
        (_allowed("auto", "unknown"), "tool_choice"),
        (_allowed("required"), "tool_choice"),
    ],
)
def test_a_tool_choice_that_cannot_be_met_is_refused_by_its_field(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parsed(tools=[WEATHER, MORE], tool_choice=value)
    assert refusal.value.param == param


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_message_of_role_and_text_is_read_as_one_with_empty_fields_beside_them(role: str) -> None:
    plain, full = {"role": role, "content": " a\u2028"}, {"content": " a\u2028", "tool_calls": None, "role": role}
    first, second = ChatProtocol().parse({"model": "m", "messages": [plain, full]}).messages
    assert first == second
    assert type(first) is Message
    assert first.content == " a\u2028"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": [], "content": "a"}, "messages[1].role"),
        ({"role": "owner", "content": "a"}, "messages[1].role"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user"}, None),
        ({"role": "tool", "content": "a"}, None),
        ("user", "messages[1]"),
    ],
)
def test_an_error_names_the_message_also_after_plain_ones(message: Any, param: str | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}, message]}
    if param is None:
        assert len(ChatProtocol().parse(body).messages) == 2
        return
    with pytest.raises(InvalidRequest) as raised:
        ChatProtocol().parse(body)
    assert raised.value.param == param


def test_legacy_function_calls_are_calls_and_their_results_refer_to_them() -> None:
    called = {"content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "function", "name": "weather", "content": "sunny"}
    *_, first, one, second, two = parsed(called, result, called, result).messages
    (call,) = first.tool_calls
    assert call[1:] == ("weather", '{"city": "Rome"}')
    assert (one.role, one.content, one.name, one.tool_call_id) == (Role.TOOL, "sunny", "weather", call.id)
    assert two.tool_call_id == second.tool_calls[0].id != call.id


def test_a_legacy_call_beside_the_same_call_is_one_call() -> None:
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": function}]
    assert parsed({"tool_calls": calls, "function_call": function}).messages[-1].tool_calls[0].id == "c"
    assert parsed({"tool_calls": calls, "function_call": None}).messages[-1].tool_calls[0].id == "c"


@pytest.mark.parametrize(
    ("answer", "param"),
    [
        ({"function_call": "auto"}, "messages[1].function_call"),
        ({"function_call": {"arguments": "{}"}}, "messages[1].function_call.name"),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "a"}}], "function_call": {"name": "b"}},
            "messages[1].function_call",
        ),
    ],
)
def test_a_legacy_call_that_cannot_be_kept_is_refused(answer: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parsed(answer)
    assert raised.value.param == param


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def test_parameters_may_be_a_list_as_qwen_agent_declares_them() -> None:
    city = {"name": "city", "type": "string", "description": "Where.", "required": True}
    unit = {"name": "unit", "type": "string", "enum": ["C", "F"], "required": False}
    day = {"name": "day", "type": "integer"}
    (tool,) = parsed(tools=[function([city, unit, day])]).tools
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "day": {"type": "integer"},
        },
        "required": ["city"],
    }
    (tool,) = parsed(tools=[function([])]).tools
    assert tool.parameters == {"type": "object", "properties": {}, "required": []}


@pytest.mark.parametrize(
    ("listed", "param"),
    [
        (["city"], "[0]"),
        ([{"type": "string"}], "[0].name"),
        ([{"name": 3}], "[0].name"),
        ([{"name": "a"}, {"name": "a"}], "[1].name"),
        ([{"name": "a", "required": "yes"}], "[0].required"),
        ("city", ""),
    ],
)
def test_a_list_of_parameters_that_is_malformed_is_refused_by_its_path(listed: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parsed(tools=[function(listed)])
    assert raised.value.param == f"tools[0].function.parameters{param}"
