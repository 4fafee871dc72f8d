"""Responses requests as real clients send them parse to the right `TurnRequest`, or give an error naming the field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.responses.input_items import ITEM_REFERENCE
from proxy.protocols.responses.item_ids import encrypt, origin_of, read_encrypted
from proxy.protocols.responses.protocol import HONOURED, IGNORED, REFUSED
from proxy.types import Message, ResponseFormat, Role, ToolCall, ToolChoice, ToolChoiceMode, TurnRequest
from tests.unit.proxy.protocols.response_bodies import PROTOCOL, WEATHER, assistant, request
from tokengrove.errors import InvalidRequest, ProxyError, UnsupportedParameter

HEX = "0123456789abcdef" * 2
OTHER = "f" * 32
ORIGIN = f"resp_{HEX}"


def parse(*items: Any, **fields: Any) -> tuple[Message, ...]:
    return request(input=list(items), **fields).messages


def call(call_id: str, item_id: str | None = None) -> dict[str, Any]:
    return {"type": "function_call", "id": item_id, "call_id": call_id, "name": "weather", "arguments": "{}"}


def output(call_id: str, text: Any = "sunny") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str, item_id: str | None = None) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": item_id, "content": content, "status": "completed"}


def thought(text: str | None = None, item_id: str | None = None, **more: Any) -> dict[str, Any]:
    content = None if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, **more}


def test_a_string_is_one_user_message_and_instructions_lead() -> None:
    assert request(input="hi", instructions="be kind").messages == (
        Message(Role.SYSTEM, "be kind", name="instructions"),
        Message(Role.USER, "hi"),
    )


def test_items_without_a_type_are_messages_and_developers_are_systems() -> None:
    parsed = parse(
        {"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "input_text", "text": "u"}]}
    )
    assert parsed == (Message(Role.SYSTEM, "d"), Message(Role.USER, "u"))


def test_a_replayed_answer_is_one_message_with_its_origin() -> None:
    items = [thought("hm", f"rs_{HEX}"), said("wait", f"msg_{HEX}"), call("call_1", f"fc_{HEX}_0"), output("call_1")]
    assert parse({"role": "user", "content": "hi"}, *items)[1:] == (
        assistant("wait", ("call_1", "weather", "{}"), reasoning="hm", origin=ORIGIN),
        Message(Role.TOOL, "sunny", tool_call_id="call_1"),
    )


def test_items_without_ids_are_put_together_where_they_can_be_of_one_answer() -> None:
    parsed = parse(
        thought("hm"), said("a"), call("call_1"), call("call_2"), output("call_1"), output("call_2"), said("b")
    )
    two = (("call_1", "weather", "{}"), ("call_2", "weather", "{}"))
    assert [m for m in parsed if m.role is Role.ASSISTANT] == [assistant("a", *two, reasoning="hm"), assistant("b")]


def test_calls_before_their_text_are_still_of_one_answer() -> None:
    assert parse(call("call_1"), said("a")) == (assistant("a", ("call_1", "weather", "{}")),)


def test_two_texts_in_a_row_are_two_messages_unless_they_have_one_origin() -> None:
    assert parse(said("a"), said("b")) == (assistant("a"), assistant("b"))
    assert parse(said("a"), said("", f"msg_{HEX}")) == (assistant("a"), assistant("", origin=ORIGIN))
    assert parse(said("a", f"msg_{HEX}"), said("b", f"msg_{HEX}_1")) == (assistant("ab", origin=ORIGIN),)
    other = f"resp_{OTHER}"
    assert parse(said("a", f"msg_{HEX}"), call("c", f"fc_{OTHER}_0")) == (
        assistant("a", origin=ORIGIN),
        assistant("", ("c", "weather", "{}"), origin=other),
    )


def test_reasoning_after_a_text_or_a_call_begins_another_answer() -> None:
    assert parse(said("a"), thought("hm"), said("b")) == (assistant("a"), assistant("b", reasoning="hm"))
    assert len(parse(call("call_1"), thought("hm"))) == 2


def test_results_between_calls_do_not_split_an_answer() -> None:
    items = [call("call_1", f"fc_{HEX}_0"), output("call_1"), call("call_2", f"fc_{HEX}_1"), output("call_2")]
    two = (("call_1", "weather", "{}"), ("call_2", "weather", "{}"))
    first, *results = parse(*items)
    assert first == assistant("", *two, origin=ORIGIN)
    assert [result.tool_call_id for result in results] == ["call_1", "call_2"]


def test_without_ids_a_result_ends_an_answer() -> None:
    parsed = parse(call("call_1"), output("call_1"), call("call_2"), output("call_2"), said("a"))
    assert [len(message.tool_calls) for message in parsed] == [1, 0, 1, 0, 0]


def test_a_user_message_ends_an_answer_whatever_its_ids_say() -> None:
    parsed = parse(said("a", f"msg_{HEX}"), {"role": "user", "content": "u"}, call("c", f"fc_{HEX}_0"))
    assert [message.role for message in parsed] == [Role.ASSISTANT, Role.USER, Role.ASSISTANT]


def test_encrypted_content_alone_brings_back_reasoning_and_origin() -> None:
    item = thought(encrypted_content=encrypt(ORIGIN, "why: näher"))
    assert parse(item, said("a")) == (assistant("a", reasoning="why: näher", origin=ORIGIN),)


@pytest.mark.parametrize("foreign", ["gAAAAABo", "%%%", "ünlesbar", "dG9rZW5ncm92ZTo=", ""])
def test_foreign_encrypted_content_is_ignored(foreign: str) -> None:
    assert parse(thought(encrypted_content=foreign), said("a")) == (assistant("a"),)


def test_a_summary_replaces_missing_reasoning_text() -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert parse(item, said("a")) == (assistant("a", reasoning="in short"),)


def test_item_references_become_one_reference_to_the_stored_answer() -> None:
    items = [{"type": "item_reference", "id": f"rs_{HEX}"}, {"id": f"msg_{HEX}"}, call("c", f"fc_{HEX}_0"), output("c")]
    first, second = parse(*items)
    assert (first.name, first.origin, [made.id for made in first.tool_calls]) == (ITEM_REFERENCE, ORIGIN, ["c"])
    assert second.tool_call_id == "c"


def test_a_reference_is_never_merged_with_a_foreign_answer() -> None:
    parsed = parse(call("c"), {"type": "item_reference", "id": f"msg_{HEX}"})
    assert [message.origin for message in parsed] == [None, ORIGIN]


def test_a_reference_to_an_unknown_item_is_an_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({"type": "item_reference", "id": "rs_68af"})
    assert caught.value.param == "input[0].id"


def test_results_are_strings_or_parts_and_may_lack_the_call_id() -> None:
    items = [call("call_1"), {"type": "function_call_output", "output": [{"type": "input_text", "text": "x"}]}]
    assert parse(*items)[1] == Message(Role.TOOL, "x", tool_call_id="call_1")


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
@pytest.mark.parametrize("where", ["content", "output"])
def test_content_other_than_text_is_refused_with_its_path(kind: str, where: str) -> None:
    part = {"type": kind, "image_url": "data:"}
    item = {"role": "user", "content": [part]} if where == "content" else output("c", [part])
    with pytest.raises(UnsupportedParameter) as caught:
        parse(item)
    assert caught.value.param == f"input[0].{where}[0]"


def test_tools_of_a_provider_are_dropped_and_those_of_a_namespace_are_taken() -> None:
    inner = [{"type": "function", "name": "lookup"}, {"type": "custom", "name": "c"}, WEATHER]
    tools = [WEATHER, {"type": "web_search"}, {"type": "namespace", "name": "mcp", "description": "", "tools": inner}]
    parsed = request(tools=tools)
    assert [tool.name for tool in parsed.tools] == ["weather", "lookup", "c"]
    assert parsed.echo["namespaces"] == {"lookup": "mcp", "c": "mcp"}
    assert parsed.dropped == (
        "tools[1] of type web_search",
        "tools[2].tools[2] with a name already in use: weather",
    )


def test_another_tool_of_the_same_name_is_refused_by_its_path() -> None:
    inner = [{"type": "function", "name": "weather", "description": "another"}]
    with pytest.raises(InvalidRequest, match="another tool named 'weather'") as caught:
        request(tools=[WEATHER, {"type": "namespace", "name": "mcp", "tools": inner}])
    assert caught.value.param == "tools[1].tools[0]"


def test_the_tool_choice_is_a_mode_a_function_or_a_list_of_them() -> None:
    more = {**WEATHER, "name": "more"}
    for value, choice, names in [
        (None, ToolChoice(), ["weather", "more"]),
        ("required", ToolChoice(ToolChoiceMode.REQUIRED), ["weather", "more"]),
        ("none", ToolChoice(ToolChoiceMode.NONE), ["weather", "more"]),
        ({"type": "function", "name": "more"}, ToolChoice(ToolChoiceMode.NAMED, "more"), ["weather", "more"]),
        (_allowed("auto", "more"), ToolChoice(), ["more"]),
        (_allowed("required", "more"), ToolChoice(ToolChoiceMode.NAMED, "more"), ["weather", "more"]),
        (_allowed("required", "more", "weather"), ToolChoice(ToolChoiceMode.REQUIRED), ["weather", "more"]),
    ]:
        parsed = request(tools=[WEATHER, more], tool_choice=value)
        assert (parsed.tool_choice, [tool.name for tool in parsed.tools]) == (choice, names)


def _allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"type": "web_search_preview"}, UnsupportedParameter),
        ({"type": "mcp", "server_label": "x"}, UnsupportedParameter),
        ({"type": "function", "name": "unknown"}, InvalidRequest),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, UnsupportedParameter),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "no"}]}, InvalidRequest),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, InvalidRequest),
        ("always", InvalidRequest),
        (5, InvalidRequest),
    ],
)
def test_a_tool_choice_that_no_tool_satisfies_is_an_error(value: Any, error: type[ProxyError]) -> None:
    with pytest.raises(error) as caught:
        request(tools=[WEATHER, {"type": "web_search"}], tool_choice=value)
    assert (caught.value.param or "").startswith("tool_choice")


def test_sampling_and_options_reach_the_turn() -> None:
    parsed = request(
        temperature=0.2,
        max_output_tokens=7,
        max_tokens=3,
        top_k=4,
        stop=["x"],
        reasoning={"effort": "low", "summary": "auto"},
        chat_template_kwargs={"a": 1},
    )
    assert (parsed.sampling.temperature, parsed.sampling.max_tokens, parsed.sampling.top_k) == (0.2, 7, 4)
    assert parsed.given == {"temperature", "max_tokens", "top_k", "stop"}
    assert parsed.template_options == {"a": 1, "reasoning_effort": "low"}
    assert parsed.dropped == ("max_tokens", "reasoning.summary")


def test_logprobs_are_asked_for_by_include_or_by_their_number() -> None:
    assert not request().logprobs
    assert request(include=["message.output_text.logprobs"]).logprobs
    assert (request(top_logprobs=2).logprobs, request(top_logprobs=2).top_logprobs) == (True, 2)


def test_the_text_format_is_a_response_format() -> None:
    schema = {"type": "object"}
    assert request(text={"format": {"type": "text"}, "verbosity": "low"}).response_format is None
    assert request(text={"format": {"type": "json_object"}}).response_format == ResponseFormat(param="text.format")
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert request(text=wanted).response_format == ResponseFormat(schema, param="text.format", strict=True)
    with pytest.raises(InvalidRequest) as caught:
        request(text={"format": {"type": "json_schema", "name": "n"}})
    assert caught.value.param == "text.format.schema"


def test_only_after_a_previous_response_may_the_input_be_empty() -> None:
    parsed = request(input=[], previous_response_id=ORIGIN, store=False)
    assert (parsed.previous_id, parsed.messages) == (ORIGIN, ())
    for value in ([], None, [{"type": "web_search_call", "id": "x"}]):
        with pytest.raises(InvalidRequest) as caught:
            request(input=value, instructions="be kind")
        assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], "body"),
        ({"model": 5, "input": "x"}, "model"),
        ({"model": "m"}, "input"),
        ({"model": "m", "input": 5}, "input"),
        ({"model": "m", "input": [5]}, "input[0]"),
        ({"model": "m", "input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"model": "m", "input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"model": "m", "input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"model": "m", "input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"model": "m", "input": "x", "metadata": 5}, "metadata"),
        ({"model": "m", "input": "x", "store": "yes"}, "store"),
        ({"model": "m", "input": "x", "include": "logprobs"}, "include"),
        ({"model": "m", "input": "x", "truncation": "middle"}, "truncation"),
        ({"model": "m", "input": "x", "previous_response_id": "a\0b"}, "previous_response_id"),
        ({"model": "m", "input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"model": "m", "input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
def test_an_invalid_field_is_named(body: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PROTOCOL.parse(body)
    assert caught.value.param == param


def test_a_very_long_run_of_calls_takes_linear_time() -> None:
    items = [call(f"call_{number}") for number in range(20_000)]
    names = [{"type": "function", "name": f"f{number}"} for number in range(20_000)]
    parsed = request(input=items, tools=names, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": names})
    assert (len(parsed.messages[0].tool_calls), len(parsed.tools)) == (20_000, 20_000)


@given(st.text())
@pytest.mark.wide
def test_encrypted_content_decodes_to_what_was_encoded(text: str) -> None:
    assert read_encrypted(encrypt(ORIGIN, text)) == (ORIGIN, text)


@given(st.text())
def test_any_text_is_safe_as_an_item_id(text: str) -> None:
    assert origin_of(text) is None
    read_encrypted(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ITEM_KEYS = ("type", "role", "content", "id", "call_id", "name", "arguments", "output", "summary", "encrypted_content")
WORDS = ("message", "reasoning", "function_call", "function_call_output", "item_reference", "user", "assistant", "x")
VALUES = JSON | st.sampled_from([*WORDS, f"msg_{HEX}", f"fc_{HEX}_0", "function", "namespace", "allowed_tools", "auto"])
ITEMS = st.lists(st.dictionaries(st.sampled_from(ITEM_KEYS), VALUES, max_size=6) | VALUES, max_size=5)
TOOLS = st.lists(
    st.dictionaries(st.sampled_from(["type", "name", "tools", "parameters", "strict", "mode"]), VALUES | ITEMS),
    max_size=3,
)
FIELDS = st.sampled_from(sorted(HONOURED | IGNORED | REFUSED))


@given(
    st.fixed_dictionaries({"model": st.just("m") | JSON, "input": ITEMS | VALUES}),
    st.dictionaries(FIELDS, VALUES | ITEMS | TOOLS, max_size=5),
)
def test_any_body_parses_or_gives_an_error_naming_a_field(body: dict[str, Any], more: dict[str, Any]) -> None:
    try:
        parsed = PROTOCOL.parse({**more, **body})
    except InvalidRequest as error:
        assert error.param
        return
    assert isinstance(parsed, TurnRequest)
    orjson.dumps(PROTOCOL.stream(parsed, ORIGIN, 1, 1).start().decode())
    assert all(isinstance(each, ToolCall) for message in parsed.messages for each in message.tool_calls)
