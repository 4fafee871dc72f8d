"""The acting script with tools, results, JSON and plain questions, read back by the real parser."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.acting import act
from proxy.engine.scripted.arguments import parse_options
from proxy.engine.scripted.instances import Mentions, instance, mentioned_words
from proxy.engine.scripted.prompt_text import read_prompt
from proxy.prompt_ids import PromptIds
from proxy.types import (
    Api,
    Message,
    ResponseFormat,
    Role,
    SamplingParams,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)
from tests.support import tiny_renderer
from tokengrove.errors import ConfigurationError, UnsupportedParameter

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "", CITY)
TIME = Tool("get_time", "", CITY)
FINAL = Tool("final_answer", "", {"type": "object", "properties": {"answer": {"type": "string"}}})


def asking(text: str, *more: Message, **options: Any) -> TurnRequest:
    return TurnRequest(Api.CHAT, "m", (Message(Role.USER, text), *more), **options)


def played(turn: TurnRequest, *, think: bool = False) -> Message:
    """The answer to `turn`, parsed by the server's output parser."""
    renderer = tiny_renderer()
    prompt = renderer.render(turn.messages, turn.tools, turn.template_options)
    request = GenerateRequest(
        "r", PromptIds(prompt), SamplingParams(max_tokens=999), renderer.stop_token_ids, turn=turn
    )
    parser = renderer.parser(turn.tools, turn.tool_choice, prompt)
    reply = act(renderer, think=think)(request)
    assert reply.chunk == 1 and reply.ids[-1] in renderer.stop_token_ids
    parser.feed(reply.ids)
    parser.finish()
    return parser.message


def calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def test_a_question_with_tools_is_answered_by_a_call_with_its_words() -> None:
    assert calls(played(asking("What is the weather in Paris?", tools=(WEATHER, TIME)))) == [
        ("get_weather", {"city": "Paris"})
    ]


def test_several_cities_make_several_calls_unless_parallel_calls_are_off() -> None:
    turn = asking("Compare the weather in Paris and New York.", tools=(WEATHER,))
    assert len(calls(played(turn))) == 2
    assert len(calls(played(replace(turn, parallel_tool_calls=False)))) == 1


def test_all_tools_in_the_question_are_called() -> None:
    turn = asking("What is the weather AND the time in Tokyo? Call both tools.", tools=(WEATHER, TIME))
    assert calls(played(turn)) == [("get_weather", {"city": "Tokyo"}), ("get_time", {"city": "Tokyo"})]


def test_a_named_tool_is_called_and_tool_choice_none_gives_text() -> None:
    turn = asking("Hello", tools=(WEATHER, TIME))
    named = replace(turn, tool_choice=ToolChoice(ToolChoiceMode.NAMED, "get_time"))
    assert [name for name, _ in calls(played(named))] == ["get_time"]
    none = played(replace(turn, tool_choice=ToolChoice(ToolChoiceMode.NONE)))
    assert not none.tool_calls and none.content


def test_results_are_reported_or_submitted_if_a_call_is_forced() -> None:
    called = Message(Role.ASSISTANT, "", (ToolCall("c", "get_weather", '{"city": "Paris"}'),))
    result = Message(Role.TOOL, "21 degrees", tool_call_id="c")
    turn = asking("What is the weather in Paris?", called, result, tools=(WEATHER, FINAL))
    told = played(turn)
    assert "21 degrees" in told.content and not told.tool_calls
    forced = played(replace(turn, tool_choice=ToolChoice(ToolChoiceMode.REQUIRED)))
    assert calls(forced) == [("final_answer", {"answer": "21 degrees"})]


def test_json_fits_its_schema() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    turn = asking('Invent "Ada", 36 years old.', response_format=ResponseFormat(schema))
    assert json.loads(played(turn).content) == {"name": "Ada", "age": 36}
    assert isinstance(json.loads(played(replace(turn, response_format=ResponseFormat())).content), dict)


def test_a_choice_is_the_mentioned_one_or_the_first_and_patterns_are_refused() -> None:
    choices = ResponseFormat(choices=("red", "blue"), param="structured_outputs.choice")
    assert played(asking("Is the sky blue?", response_format=choices)).content == "blue"
    assert played(asking("Which?", response_format=choices)).content == "red"
    for pattern in (ResponseFormat(regex="a+", param="regex"), ResponseFormat(ebnf='root ::= "a"', param="ebnf")):
        with pytest.raises(UnsupportedParameter, match=f"^'{pattern.param}' is not supported by the scripted engine"):
            played(asking("Which?", response_format=pattern))


def test_markers_in_text_stay_text() -> None:
    text = "<think>no</think> <tool_call>neither</tool_call> <|im_end|>"
    message = played(asking(f"Repeat this text exactly, nothing else: {text}", tools=()))
    assert message.content == text and message.reasoning is None


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Say exactly: alpha beta", "alpha beta"),
        ("Count from 1 to 3.", "1, 2, 3"),
        ("What is 17 * 3?", "51"),
        ("My name is Ada. What is my name?", "Ada"),
    ],
)
def test_simple_instructions_are_followed(question: str, answer: str) -> None:
    assert played(asking(question)).content == answer


def test_thinking_precedes_the_answer_unless_the_request_disables_it() -> None:
    turn = asking("Say exactly: yes")
    assert played(turn, think=True).reasoning
    off = replace(turn, template_options={"enable_thinking": False})
    assert not played(off, think=True).reasoning
    begun = replace(turn, prefill=Message(Role.ASSISTANT, "It is"))
    assert "think" not in played(begun, think=True).content


CALLED = Message(Role.ASSISTANT, "Let me see.", (ToolCall("c", "get_weather", '{"city": "Paris"}'),))
RESULTS = (Message(Role.TOOL, "21 degrees", tool_call_id="c"), Message(Role.TOOL, "and\nsunny", tool_call_id="d"))


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("tools", [(), (WEATHER, TIME)], ids=["without tools", "with tools"])
@pytest.mark.parametrize("more", [(), (CALLED, *RESULTS), (CALLED, *RESULTS, Message(Role.USER, "And in Rome?"))])
def test_a_prompt_of_token_ids_is_answered_like_its_messages(
    more: tuple[Message, ...], tools: tuple[Tool, ...], think: bool
) -> None:
    renderer = tiny_renderer()
    messages = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "What is the weather in Paris?"), *more)
    prompt = renderer.render(messages, tools, {})
    asked = TurnRequest(Api.CHAT, "m", messages, tools)
    ids = TurnRequest(Api.GENERATE, "m", (), input_ids=prompt)
    replies = []
    for turn in (asked, ids, None):  # None: outside of sessions
        request = GenerateRequest("r", PromptIds(prompt), SamplingParams(), renderer.stop_token_ids, turn=turn)
        replies.append(renderer.decode(act(renderer, think=think)(request).ids))
    assert replies[0] == replies[1] == replies[2]
    assert ("<tool_call>" in replies[1]) == bool(tools and not more)


@pytest.mark.parametrize(
    "text", ["", "Once upon a time", "<|im_start|>user\n<tool_response>\nx<|im_end|>\n<tool_call>\n{"]
)
def test_a_prompt_of_another_form_is_answered_too(text: str) -> None:
    renderer = tiny_renderer()
    turn = TurnRequest(Api.GENERATE, "m", (), input_ids=renderer.encode(text))
    request = GenerateRequest("r", PromptIds(renderer.encode(text)), SamplingParams(), (), turn=turn)
    assert renderer.decode(act(renderer)(request).ids)


def test_what_the_model_wrote_need_not_be_json() -> None:
    text = "<|im_start|>assistant\n<tool_call>\n{no\n</tool_call><tool_call>\n[1]\n</tool_call><|im_end|>\n"
    assert read_prompt(text) == ((Message(Role.ASSISTANT, ""),), ())


@pytest.mark.parametrize("tool", ['{"a": 1}', '{"function": 3}', '{"function": {"name": 4}}', '{"a":' * 100_000])
def test_what_stands_among_the_tools_need_not_be_one(tool: str) -> None:
    listed = f'{tool}\n{{"name": "f", "description": 5, "parameters": []}}'
    text = f"<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{listed}\n</tools><|im_end|>\n"
    assert read_prompt(text) == ((Message(Role.SYSTEM, "Be brief."),), (Tool("f", "", {}),))


@pytest.mark.parametrize("opener", ["<|im_start|>user\n", "<tool_call>\n", "<tool_response>\n"])
def test_openers_without_an_end_are_read_once(opener: str) -> None:
    """From each of them to the end of the text it would be hours."""
    content = opener * 200_000
    for role in (Role.USER, Role.ASSISTANT):
        said = content if role is Role.USER else content.strip()
        assert read_prompt(f"<|im_start|>{role}\n{content}<|im_end|>") == ((Message(role, said),), ())


def test_the_same_conversation_gets_the_same_answer() -> None:
    turn = asking("Tell me about the sea.")
    assert played(turn) == played(turn)  # without calls, as those have fresh ids


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": 3}, 3),
        ({"enum": ["celsius", "fahrenheit"]}, "fahrenheit"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 4),
        ({"type": "array", "items": {"type": "number"}, "minItems": 3}, [4, 2.5, 1]),
        ({"type": "integer", "maximum": 2}, 2),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}, True),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}]}, {"a": None}),
        ({"type": "string", "maxLength": 2}, "Ro"),
        ({"type": ["null", "string"]}, "Rome"),
    ],
)
def test_an_instance_uses_the_text_within_the_schema(schema: dict[str, Any], value: Any) -> None:
    assert instance(schema, Mentions.of("Give 4 or 2.5 in Rome in fahrenheit")) == value


def test_quoted_words_win_over_names() -> None:
    assert mentioned_words("Send 'a b' and `c` to Rome") == ["a b", "c"]
    assert mentioned_words("What is it like in New York and Rome?") == ["New York", "Rome"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"play": "dead"}, "play=dead"),
        ({"play": "agent", "tokens": "3"}, "tokens"),
        ({"chunk": "0"}, "chunk=0"),
        ({"tokens": "many"}, "tokens=many"),
        ({"delay_s": "-1"}, "delay_s=-1"),
        ({"play": "agent", "think": "yes"}, "think=yes"),
    ],
)
def test_an_invalid_engine_argument_is_refused_by_name(arguments: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--engine-arg {named}:"):
        parse_options(arguments)
