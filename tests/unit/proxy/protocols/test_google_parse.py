"""Requests of Google's generateContent become the same `TurnRequest` as those of other APIs, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.parsed_items import FEWEST
from proxy.protocols.google.protocol import GoogleProtocol, StreamForm
from proxy.protocols.signatures import signature_of
from proxy.types import Message, ResponseFormat, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode
from tests.unit.proxy.protocols.google_bodies import ADD, SCHEMA, body, call, config, model, result, text, user
from tokengrove.errors import InvalidRequest, UnsupportedParameter

PROTOCOL = GoogleProtocol()
USER, ASSISTANT, SYSTEM, TOOL = Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.TOOL


def parsed(*contents: Any, **more: Any) -> Any:
    return PROTOCOL.parse(body(*contents, **more))


def configured(**fields: Any) -> Any:
    return PROTOCOL.parse(config(**fields))


def test_parts_are_joined_into_the_messages_of_all_apis() -> None:
    asked = parsed(
        user(text("one "), text("two")),
        model(text("why", thought=True, thoughtSignature=signature_of("gen_7")), text("Look."), call(id="c")),
        user(result(id="c"), text("and?")),
        systemInstruction={"parts": [text("be "), text("brief")]},
    )
    assert asked.messages == (
        Message(SYSTEM, "be brief"),
        Message(USER, "one two"),
        Message(ASSISTANT, "Look.", (ToolCall("c", "add", '{"a":1}'),), reasoning="why", origin="gen_7"),
        Message(TOOL, "2", tool_call_id="c", name="add"),
        Message(USER, "and?"),
    )


def test_snake_case_means_the_same_as_camel_case() -> None:
    camel = parsed(
        user(text("q")),
        model({**call(), "thoughtSignature": "eA=="}),
        user(result()),
        systemInstruction={"parts": [text("s")]},
        tools=[{"functionDeclarations": [ADD]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
        generationConfig={"maxOutputTokens": 5, "thinkingConfig": {"includeThoughts": True}, "stopSequences": ["x"]},
    )
    declared = {"name": "add", "description": "adds", "parameters_json_schema": SCHEMA}
    snake = parsed(
        user(text("q")),
        model({"function_call": {"name": "add", "args": {"a": 1}}, "thought_signature": "eA=="}),
        user({"function_response": {"name": "add", "response": {"result": "2"}}}),
        system_instruction={"parts": [text("s")]},
        tools=[{"function_declarations": [declared]}],
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["add"]}},
        generation_config={
            "max_output_tokens": 5,
            "thinking_config": {"include_thoughts": True},
            "stop_sequences": ["x"],
        },
    )
    assert snake == camel


def test_results_without_ids_answer_open_calls_of_their_function_in_order() -> None:
    asked = parsed(
        user(text("q")),
        model(call("add"), call("sub"), call("add")),
        user(result("sub"), result("add"), result("add")),
    )
    calls = asked.messages[1].tool_calls
    assert len({each.id for each in calls}) == 3
    assert [each.tool_call_id for each in asked.messages[2:]] == [calls[1].id, calls[0].id, calls[2].id]


def test_a_result_whose_id_no_call_has_answers_the_open_call_of_its_function() -> None:
    asked = parsed(user(text("q")), model(call("add")), user(result("add", id="the client's own")))
    assert asked.messages[2].tool_call_id == asked.messages[1].tool_calls[0].id


def test_places_of_calls_stand_for_their_ids_however_the_history_grows() -> None:
    first = [user(text("q")), model(call()), user(result())]
    longer = [*first, model(text("so")), *(user(text(str(n))) for n in range(FEWEST))]
    bodies: dict[Any, Any] = {}
    PROTOCOL.parse(body(*longer), bodies)
    again = PROTOCOL.parse(body(*longer, model(text("x")), user(text("end"))), bodies)
    assert again.messages[:3] == parsed(*first).messages
    assert again == parsed(*longer, model(text("x")), user(text("end")))


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"result": "21 degrees"}, "21 degrees"),
        ({"output": "21 degrees"}, "21 degrees"),
        ({"output": [1]}, "[1]"),
        ({"error": "none"}, '{"error":"none"}'),
        ({"result": "x", "unit": "C"}, '{"result":"x","unit":"C"}'),
        ({}, "{}"),
        ({"big": 2**70}, '{"big": 1180591620717411303424}'),
    ],
)
def test_a_result_is_shown_as_text(response: Any, shown: str) -> None:
    assert parsed(user(text("q")), model(call()), user(result(response=response))).messages[-1].content == shown


def test_adjacent_contents_of_the_model_are_one_answer() -> None:
    asked = parsed(
        user(text("q")), model(text("a", thought=True)), model(text("b")), model(call(id="c")), user(result())
    )
    assert len(asked.messages) == 3
    assert asked.messages[1][:2] == (ASSISTANT, "b") and asked.messages[1].reasoning == "a"
    assert asked.messages[2].tool_call_id == "c"


def test_a_last_content_of_the_model_is_continued() -> None:
    asked = parsed(user(text("q")), model(text("It is")))
    assert asked.prefill == Message(ASSISTANT, "It is") and len(asked.messages) == 1


def test_sampling_is_read_from_the_generation_config() -> None:
    asked = configured(
        temperature=0.5, topP=0.9, topK=40.0, seed=3, maxOutputTokens=7, candidateCount=2, stopSequences=["END"],
        presencePenalty=0.1, frequencyPenalty=0.2, responseLogprobs=True, logprobs=4,
    )  # fmt: skip
    assert asked.sampling.to_json() == {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3, "max_tokens": 7, "stop": ["END"]},
        **{"presence_penalty": 0.1, "frequency_penalty": 0.2},
    }
    assert (asked.n, asked.logprobs, asked.top_logprobs, asked.stream) == (2, True, 4, False)
    assert GoogleProtocol(StreamForm.ARRAY).parse(body()).stream


@pytest.mark.parametrize(
    ("thinking", "options", "dropped"),
    [
        ({"thinkingLevel": "LOW"}, {"reasoning_effort": "low"}, ()),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, {}, ()),
        ({"thinkingBudget": 0}, {"enable_thinking": False}, ()),
        ({"thinkingBudget": -1}, {}, ()),
        ({"thinkingBudget": 8192}, {}, ("generationConfig.thinkingConfig.thinkingBudget",)),
        ({"includeThoughts": False}, {}, ()),
    ],
)
def test_the_thinking_config_sets_template_options(thinking: Any, options: Any, dropped: Any) -> None:
    asked = configured(thinkingConfig=thinking)
    assert (asked.template_options, asked.dropped) == (options, dropped)


def test_schemas_of_googles_dialect_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "n": {"type": "INTEGER", "nullable": True},
            "list": {"type": "ARRAY", "items": {"type": "STRING", "enum": ["a"]}, "minItems": "1"},
            "either": {"anyOf": [{"type": "NUMBER"}, {"ref": "#/$defs/d"}]},
            "type": {"type": "BOOLEAN", "description": "a property that is named like a field"},
        },
        "propertyOrdering": ["list", "n"],
        "required": ["n"],
        "defs": {"d": {"type": "TYPE_UNSPECIFIED"}},
    }
    asked = parsed(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}])
    (tool,) = asked.tools
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"type": "string", "enum": ["a"]}, "minItems": 1},
            "n": {"type": ["integer", "null"]},
            "either": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/d"}]},
            "type": {"type": "boolean", "description": "a property that is named like a field"},
        },
        "required": ["n"],
        "$defs": {"d": {}},
    }
    assert list(tool.parameters["properties"]) == ["list", "n", "either", "type"]


def test_a_schema_that_is_nested_too_deeply_is_refused_by_its_own_path() -> None:
    schema: dict[str, Any] = {"type": "STRING"}
    for _ in range(900):
        schema = {"type": "ARRAY", "items": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        parsed(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}])
    assert caught.value.param == "tools[0].functionDeclarations[0].parameters"


def test_a_json_schema_is_kept_as_it_is() -> None:
    plain = parsed(tools=[{"functionDeclarations": [ADD]}])
    assert plain.tools == (Tool("add", "adds", SCHEMA),)
    assert (
        parsed(tools=[{"functionDeclarations": [{**ADD, "parametersJsonSchema": None, "parameters": SCHEMA}]}]) == plain
    )


TWO = [{"functionDeclarations": [ADD, {"name": "sub"}]}]


@pytest.mark.parametrize(
    ("choice", "mode", "seen"),
    [
        ({"mode": "AUTO"}, ToolChoice(), ["add", "sub"]),
        ({"mode": "NONE"}, ToolChoice(ToolChoiceMode.NONE), ["add", "sub"]),
        ({"mode": "ANY"}, ToolChoice(ToolChoiceMode.REQUIRED), ["add", "sub"]),
        ({"mode": "ANY", "allowedFunctionNames": ["sub"]}, ToolChoice(ToolChoiceMode.NAMED, "sub"), ["add", "sub"]),
        ({"mode": "ANY", "allowedFunctionNames": ["sub", "add"]}, ToolChoice(ToolChoiceMode.REQUIRED), ["add", "sub"]),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["sub"]}, ToolChoice(), ["sub"]),
    ],
)
def test_the_mode_of_function_calling_is_a_tool_choice(choice: Any, mode: ToolChoice, seen: list[str]) -> None:
    asked = parsed(tools=TWO, toolConfig={"functionCallingConfig": choice})
    assert (asked.tool_choice, [tool.name for tool in asked.tools]) == (mode, seen)
    validated = ("toolConfig.functionCallingConfig.mode VALIDATED",) if choice["mode"] == "VALIDATED" else ()
    assert asked.dropped == validated


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, ResponseFormat(param="generationConfig.responseMimeType")),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "INTEGER"}},
            ResponseFormat({"type": "integer"}, param="generationConfig.responseSchema"),
        ),
        (
            {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA},
            ResponseFormat(SCHEMA, param="generationConfig.responseJsonSchema"),
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["yes", "no"]}},
            ResponseFormat(choices=("yes", "no"), param="generationConfig.responseSchema"),
        ),
    ],
)
def test_the_media_type_and_the_schema_demand_a_format(fields: Any, wanted: Any) -> None:
    assert configured(**fields).response_format == wanted


def test_tools_that_only_google_runs_are_left_out_by_name() -> None:
    asked = parsed(
        tools=[{"googleSearch": {}}, {"code_execution": {}, "functionDeclarations": [ADD]}, {"urlContext": {}}]
    )
    assert [tool.name for tool in asked.tools] == ["add"]
    assert asked.dropped == (
        "tools[0] of type googleSearch",
        "tools[1] of type codeExecution",
        "tools[2] of type urlContext",
    )


def test_unknown_fields_are_ignored_by_name() -> None:
    asked = parsed(safetySettings=[], fooBar=1, generationConfig={"audioTimestamp": True, "x": 1, "y": None})
    assert asked.dropped == ("fooBar", "safetySettings", "generationConfig.audioTimestamp", "generationConfig.x")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "contents"),
    ({"contents": []}, "contents"),
    ({"contents": {}}, "contents"),
    (body(user()), "contents[0].parts"),
    (body({"role": "nobody", "parts": [text("x")]}), "contents[0].role"),
    (body(user({})), "contents[0].parts[0]"),
    (body(user({"text": 3})), "contents[0].parts[0].text"),
    (body(user({"hologram": {}})), "contents[0].parts[0].hologram"),
    (body(user({"executable_code": {"code": "1"}})), "contents[0].parts[0].executableCode"),
    (body(user({**text("x"), "inlineData": {}})), "contents[0].parts[0].inlineData"),
    (body(user(text("x", thought=True))), "contents[0].parts[0]"),
    (body(user(call())), "contents[0].parts[0].functionCall"),
    (body(user({"inlineData": {"mimeType": "image/png", "data": ""}})), "contents[0].parts[0].inlineData"),
    (body(user(text("x")), model(result())), "contents[1].parts[0].functionResponse"),
    (body(user(text("x")), model({"functionCall": {"args": {}}})), "contents[1].parts[0].functionCall.name"),
    (
        body(user(text("x")), model({"functionCall": {"name": "f", "partialArgs": [1]}})),
        "contents[1].parts[0].functionCall.partialArgs",
    ),
    (body(user(result(response="text"))), "contents[0].parts[0].functionResponse.response"),
    (body(tools=[{"computerUse": {}}]), "tools[0].computerUse"),
    (body(tools=[{"timeMachine": {}}]), "tools[0].timeMachine"),
    (body(tools=[{"functionDeclarations": [{"description": "x"}]}]), "tools[0].functionDeclarations[0].name"),
    (
        body(tools=[{"functionDeclarations": [{"name": "f", "parameters": {"type": "BLOB"}}]}]),
        "tools[0].functionDeclarations[0].parameters.type",
    ),
    (
        body(tools=[{"functionDeclarations": [{**ADD, "parameters": SCHEMA}]}]),
        "tools[0].functionDeclarations[0]",
    ),
    (body(toolConfig={"functionCallingConfig": {"mode": "MAYBE"}}), "toolConfig.functionCallingConfig.mode"),
    (body(toolConfig={"functionCallingConfig": {"mode": "ANY"}}), "toolConfig.functionCallingConfig.mode"),
    (
        body(tools=TWO, toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}),
        "toolConfig.functionCallingConfig.allowedFunctionNames",
    ),
    (
        body(tools=TWO, toolConfig={"functionCallingConfig": {"allowedFunctionNames": ["add"]}}),
        "toolConfig.functionCallingConfig.allowedFunctionNames",
    ),
    (body(cachedContent="cachedContents/1"), "cachedContent"),
    (body(guided_json={}), "guided_json"),
    (config(responseModalities=["AUDIO"]), "generationConfig.responseModalities"),
    (config(responseFormat=[{}]), "generationConfig.responseFormat"),
    (config(responseSchema=SCHEMA), "generationConfig.responseSchema"),
    (config(responseMimeType="image/png"), "generationConfig.responseMimeType"),
    (config(responseMimeType="text/x.enum"), "generationConfig.responseJsonSchema"),
    (config(topP=3), "generationConfig.topP"),
    (config(logprobs=3), "generationConfig.logprobs"),
    (config(stopSequences=[""]), "generationConfig.stopSequences"),
    (config(thinkingConfig={"thinkingBudget": -2}), "generationConfig.thinkingConfig.thinkingBudget"),
    (body(generationConfig=[]), "generationConfig"),
]


@pytest.mark.parametrize(("sent", "param"), [pytest.param(*case, id=f"{n}") for n, case in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(sent: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PROTOCOL.parse(sent)
    assert caught.value.param == param
    assert param in caught.value.message or param.rpartition(".")[0] in caught.value.message


def test_a_body_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'body' must be an object"):
        PROTOCOL.parse([])


def test_an_image_without_a_vision_model_is_an_unsupported_parameter() -> None:
    with pytest.raises(UnsupportedParameter, match="text only"):
        parsed(user({"fileData": {"fileUri": "https://x.example/a.png"}}))


def test_a_count_takes_a_whole_request_or_only_contents() -> None:
    whole = {"generateContentRequest": {"model": "models/m", **body(systemInstruction="s")}}
    assert PROTOCOL.parse_count(whole).messages == parsed(systemInstruction="s").messages
    assert PROTOCOL.parse_count(body()).messages == parsed().messages
