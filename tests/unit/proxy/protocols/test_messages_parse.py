"""Every spelling of a Messages API request gives the same `TurnRequest`; a bad one gives an error naming the field."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.messages.accepted_types import BLOCKS, TOOLS
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.signatures import signature_of
from proxy.trajectory.matching import identify
from proxy.types import Api, Message, ResponseFormat, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, TurnRequest
from tests.unit.proxy.protocols.message_bodies import CACHE, READ, body, claude_code, result, says, text
from tokengrove.errors import InvalidRequest, UnsupportedParameter

UNKNOWN = {"type": "drone_20990101", "name": "drone"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SCHEMA = {"type": "object", "properties": {}}


def parse(value: Any) -> TurnRequest:
    return MessagesProtocol().parse(value)


def call(call_id: str, **tool_input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Read", "input": tool_input}


def test_a_body_of_claude_code_is_accepted() -> None:
    request = parse(claude_code(says("user", [text("<system-reminder>", **CACHE), text("hi")])))
    system = "You are Claude Code, Anthropic's official CLI for Claude.\nYou are an interactive agent."
    assert request.api is Api.MESSAGES
    assert request.messages == (Message(Role.SYSTEM, system), Message(Role.USER, "<system-reminder>hi"))
    assert request.tools == (Tool("Read", "reads a file", READ["input_schema"]),)
    assert request.sampling.max_tokens == 32000
    assert request.stream
    assert request.template_options == {"reasoning_effort": "medium"}
    assert set(request.dropped) == {
        *("metadata", "context_management", "thinking.display"),
        *("tools[1] with defer_loading", "system[0] (x-anthropic-billing-header)"),
    }


def test_turns_of_claude_code_extend_each_other_although_header_and_cache_control_move() -> None:
    first = parse(claude_code(says("user", [text("read a", **CACHE)]), billing="cch=aaaaa"))
    echoed = says("assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}, call("toolu_1", path="a")])
    second = claude_code(
        says("user", [text("read a")]),
        echoed,
        says("user", [{**result("toolu_1", "A"), **CACHE}]),
        billing="cch=bbbbb",
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    after = parse(second)
    before = identify(first.messages, first.tools, first.template_options)
    states = identify(after.messages, after.tools, after.template_options)
    assert states.root == before.root
    assert states.states[1] == before.end
    assert [message.role for message in after.messages[2:]] == [Role.ASSISTANT, Role.TOOL]


def test_system_is_the_same_however_it_is_cut_into_blocks() -> None:
    whole = parse(body(system="one two"))
    assert whole.messages[0] == Message(Role.SYSTEM, "one two")
    assert parse(body(system=[text("one two", **CACHE)])).messages == whole.messages
    assert parse(body(system=[text("one "), text("two", **CACHE)])).messages == whole.messages


@pytest.mark.parametrize("system", [None, "", [], [text("x-anthropic-billing-header: cch=1;")]])
def test_an_empty_system_field_gives_no_message(system: Any) -> None:
    assert parse(body(system=system)).messages == (Message(Role.USER, "hi"),)


def test_only_the_line_of_a_billing_header_is_dropped_from_a_joined_string() -> None:
    request = parse(body(system="x-anthropic-billing-header: cch=1;\n\nYou are an agent."))
    assert request.messages[0] == Message(Role.SYSTEM, "You are an agent.")


def test_a_system_message_in_the_middle_stays_where_it_is() -> None:
    request = parse(body(says("user", "a"), says("system", [text("b")]), says("user", "c")))
    assert [message.role for message in request.messages] == [Role.USER, Role.SYSTEM, Role.USER]
    assert request.messages[1].content == "b"


def test_results_become_messages_before_the_text_beside_them() -> None:
    content = [text("and "), result("t1", "A"), result("t2", [text("B"), text("C")]), text("then")]
    assert parse(body(says("user", content))).messages == (
        Message(Role.TOOL, "A", tool_call_id="t1"),
        Message(Role.TOOL, "BC", tool_call_id="t2"),
        Message(Role.USER, "and then"),
    )


@pytest.mark.parametrize("beside", [[], [text("")]])
def test_results_alone_give_no_user_message(beside: list[Any]) -> None:
    request = parse(body(says("user", [result("t1", "A"), *beside])))
    assert request.messages == (Message(Role.TOOL, "A", tool_call_id="t1"),)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (result("t"), ""),
        (result("t", is_error=True), "error"),
        (result("t", [], is_error=True), "error"),
        (result("t", "no such file", is_error=True), "no such file"),
    ],
)
def test_a_failed_result_keeps_its_text_or_says_error(block: Any, words: str) -> None:
    assert parse(body(says("user", [block]))).messages[0].content == words


LATER = {**READ, "name": "Later", "defer_loading": True}
FOUND = result("t", [{"type": "tool_reference", "tool_name": "Later"}, text("found")])


def test_a_deferred_tool_is_shown_once_the_conversation_refers_to_it() -> None:
    before = parse(body(says("user", "find it"), tools=[READ, LATER]))
    assert [tool.name for tool in before.tools] == ["Read"]
    assert before.dropped == ("tools[1] with defer_loading",)
    after = parse(body(says("user", [FOUND]), tools=[READ, LATER]))
    assert [tool.name for tool in after.tools] == ["Read", "Later"]
    assert after.dropped == ()
    assert after.messages[0].content == "The tool Later is available.\nfound"


@pytest.mark.parametrize("search", ["tool_search_tool_bm25", "tool_search_tool_regex_20251119"])
def test_deferred_tools_are_shown_at_once_if_only_a_provider_could_find_them(search: str) -> None:
    request = parse(body(tools=[{"type": search, "name": "tool_search"}, LATER]))
    assert [tool.name for tool in request.tools] == ["Later"]
    assert request.dropped == (f"tools[0] of type {search}",)


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": [READ]}])
def test_a_reference_to_a_tool_that_the_request_lacks_is_refused(tools: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="refers to the tool 'Later', which 'tools' lacks") as error:
        parse(body(says("user", [FOUND]), **tools))
    assert error.value.param == "messages[0].content[0].content[0]"


def test_examples_of_a_tool_are_part_of_its_description() -> None:
    (tool,) = parse(body(tools=[{**READ, "input_examples": [{"path": "a"}, {"path": "b"}]}])).tools
    assert tool.description == 'reads a file\nExamples of arguments:\n{"path":"a"}\n{"path":"b"}'


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "adaptive"}}])
def test_the_effort_is_a_template_option_as_in_the_other_apis(thinking: dict[str, Any]) -> None:
    request = parse(body(output_config={"effort": "low"}, **thinking))
    assert request.template_options == {"reasoning_effort": "low"}
    assert request.dropped == ()
    off = parse(body(output_config={"effort": "none"}))
    assert off.template_options == {"reasoning_effort": "none", "enable_thinking": False}
    with pytest.raises(InvalidRequest) as error:
        parse(body(output_config={"effort": 3}))
    assert error.value.param == "output_config.effort"


def test_an_assistant_turn_is_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "a", "signature": "foreign"},
        {"type": "redacted_thinking", "data": "x"},
        text("b"),
        call("toolu_1", path="p"),
        text("c", citations=None),
        {**call("call_2"), **CACHE},
    ]
    request = parse(body(says("assistant", blocks), says("user", "x")))
    calls = (ToolCall("toolu_1", "Read", '{"path":"p"}'), ToolCall("call_2", "Read", "{}"))
    assert request.messages[0] == Message(Role.ASSISTANT, "bc", calls, reasoning="a")
    assert request.dropped == ("messages[0].content[1]",)


def test_neighbouring_assistant_messages_are_one_answer_with_the_origin_of_either() -> None:
    signed = {"type": "thinking", "thinking": "a", "signature": signature_of("msg_1")}
    for blocks in ([[signed], [text("b")]], [[text("b")], [signed]]):
        request = parse(body(says("user", "hi"), *(says("assistant", block) for block in blocks), says("user", "x")))
        assert request.messages[1] == Message(Role.ASSISTANT, "b", reasoning="a", origin="msg_1")


def test_numbers_beyond_64_bits_stay_in_the_input_of_a_call() -> None:
    request = parse(body(says("assistant", [call("t", n=10**30)]), says("user", "x")))
    assert json.loads(request.messages[0].tool_calls[0].arguments) == {"n": 10**30}


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "custom"}])
def test_a_tool_with_a_schema_is_a_function(kind: dict[str, Any]) -> None:
    assert parse(body(tools=[{**READ, **kind, **CACHE, "strict": True}])).tools == parse(body(tools=[READ])).tools


def test_a_typed_client_tool_with_a_schema_is_a_function() -> None:
    (tool,) = parse(body(tools=[{"type": "bash_20250124", "name": "bash", "input_schema": SCHEMA}])).tools
    assert tool == Tool("bash", "", SCHEMA)


@pytest.mark.parametrize(
    ("choice", "parsed", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice(ToolChoiceMode.REQUIRED), True),
        ({"type": "none"}, ToolChoice(ToolChoiceMode.NONE), True),
        ({"type": "tool", "name": "Read"}, ToolChoice(ToolChoiceMode.NAMED, "Read"), True),
    ],
)
def test_tool_choice(choice: Any, parsed: ToolChoice, parallel: bool) -> None:
    request = parse(body(tools=[READ], tool_choice=choice))
    assert (request.tool_choice, request.parallel_tool_calls) == (parsed, parallel)


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "between_tools"])
def test_only_disabled_thinking_changes_the_template(kind: str) -> None:
    assert parse(body(thinking={"type": kind, "budget_tokens": 2048})).template_options == {}
    assert parse(body(thinking={"type": "disabled"})).template_options == {"enable_thinking": False}


def test_sampling_is_honoured() -> None:
    request = parse(body(temperature=0, top_p=0.5, top_k=3, stop_sequences=["a", "b"]))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0, 0.5, 3, ("a", "b"))
    assert request.given == {"max_tokens", "temperature", "top_p", "top_k", "stop"}


@pytest.mark.parametrize("at", ["output_config", "output_format"])
def test_a_response_schema_is_read_from_both_places(at: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    request = parse(body(**{at: {"format": wanted} if at == "output_config" else wanted}))
    field = "output_config.format" if at == "output_config" else at
    assert request.response_format == ResponseFormat(SCHEMA, param=field)
    assert request.dropped == ()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [says("tool", "x")]}, "messages[0].role"),
        ({"messages": [says("user", 3)]}, "messages[0].content"),
        ({"messages": [says("user", [{"text": "x"}])]}, "messages[0].content[0].type"),
        ({"messages": [says("user", [{"type": []}])]}, "messages[0].content[0].type"),
        ({"messages": [says("user", [{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [says("assistant", [{**call("t"), "input": "x"}])]}, "messages[0].content[0].input"),
        ({"system": [text("a"), {"type": "text"}]}, "system[1].text"),
        ({"tools": [{"name": "t"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "absent"}}, "tool_choice.name"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_an_invalid_field_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(body(**changes))
    assert error.value.param == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [says("user", [text("a"), PNG])]}, "messages[0].content[1]"),
        ({"messages": [says("user", [result("t", [PNG])])]}, "messages[0].content[0].content[0]"),
        ({"messages": [says("user", [{"type": "hologram"}])]}, "messages[0].content[0]"),
        ({"system": [PNG]}, "system[0]"),
        ({"tools": [UNKNOWN]}, "tools[0]"),
    ],
)
def test_unsupported_fields_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as error:
        parse(body(**changes))
    assert error.value.param == param


def test_a_call_nested_too_deeply_is_an_invalid_request() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse(body(says("assistant", [call("t", deep=deep)]), says("user", "x")))


def test_a_count_accepts_a_body_without_max_tokens_and_has_the_same_prompt() -> None:
    whole = claude_code(says("user", "hi"))
    bare = {name: value for name, value in whole.items() if name not in ("max_tokens", "stream")}
    counted, asked = MessagesProtocol().parse_count(bare), parse(whole)
    assert (counted.messages, counted.tools) == (asked.messages, asked.tools)
    assert counted.template_options == asked.template_options
    assert not counted.stream


def test_a_count_may_end_with_the_beginning_of_the_answer() -> None:
    counted = MessagesProtocol().parse_count(body(says("user", "a"), says("assistant", "b")))
    assert counted.messages == (Message(Role.USER, "a"),)
    assert counted.prefill == Message(Role.ASSISTANT, "b")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
names = st.sampled_from(
    [
        *(
            "type",
            "text",
            "role",
            "content",
            "name",
            "input",
            "input_schema",
            "id",
            "tool_use_id",
            "thinking",
            "format",
        ),
        *(
            "source",
            "data",
            "title",
            "tabs",
            "tool_name",
            "toolset_name",
            "tool_references",
            "state_changes",
            "configs",
        ),
        *("signature", "user", "assistant", "system", "schema", "disable_parallel_tool_use", "defer_loading"),
    ]
)
words = st.sampled_from(
    [
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        *BLOCKS,
        *TOOLS,
        "user",
        "assistant",
        "system",
        "auto",
        "any",
    ]
)
values = st.recursive(
    scalars | words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | words, inner, max_size=5)
)
KEYS = st.sampled_from(
    [
        *("model", "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking", "stream"),
        *("output_config", "output_format", "temperature", "top_p", "top_k", "metadata", "container", "other"),
    ]
)
blocks = st.fixed_dictionaries(
    {"type": words},
    optional={"text": values, "content": values, "input": values, "source": values, "tabs": values, "tool_name": words},
)
spoken = st.fixed_dictionaries({"role": words, "content": values | st.lists(blocks, max_size=3)})


@given(st.dictionaries(KEYS, values), st.lists(spoken, min_size=1, max_size=3), st.booleans())
def test_any_body_parses_or_is_an_invalid_request(changes: dict[str, Any], said: list[Any], whole: bool) -> None:
    sent = {**body(*said), **changes} if whole else changes
    for read in (parse, MessagesProtocol().parse_count):
        try:
            request = read(sent)
        except InvalidRequest as error:
            assert error.param
        else:
            assert isinstance(request, TurnRequest)


@given(values)
def test_a_random_value_as_body_is_an_invalid_request(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse(value)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_the_input_of_a_call_is_kept_as_a_value(tool_input: dict[str, Any]) -> None:
    tool_input = orjson.loads(orjson.dumps(tool_input)) if _is_json(tool_input) else {}
    request = parse(body(says("assistant", [call("t", **{})]), says("user", "x")))
    assert request.messages[0].tool_calls[0].arguments == "{}"
    said = {"type": "tool_use", "id": "t", "name": "Read", "input": tool_input}
    (made,) = parse(body(says("assistant", [said]), says("user", "x"))).messages[0].tool_calls
    assert json.loads(made.arguments) == tool_input


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True
