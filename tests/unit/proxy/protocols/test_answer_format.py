import json
from typing import Any

import pytest

from proxy.protocols.answer_format import FORMER_FIELDS, format_fields
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.completions.protocol import CompletionsProtocol
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.types import ResponseFormat, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = 'root ::= "yes" | "no"'
MESSAGES = [{"role": "user", "content": "hi"}]
APIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatProtocol(), {"messages": MESSAGES}),
    "completions": (CompletionsProtocol(), {"prompt": "hi"}),
    "responses": (ResponsesProtocol(), {"input": "hi"}),
    "messages": (MessagesProtocol(), {"messages": MESSAGES, "max_tokens": 9}),
}


def parsed(api: str, **fields: Any) -> TurnRequest:
    protocol, body = APIS[api]
    request = protocol.parse({"model": "m", **body, **fields})
    assert isinstance(request, TurnRequest)
    return request


FORMATS: list[tuple[dict[str, Any], ResponseFormat]] = [
    ({"structured_outputs": {"json": SCHEMA}}, ResponseFormat(SCHEMA, param="structured_outputs.json")),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ResponseFormat(SCHEMA, param="structured_outputs.json")),
    ({"structured_outputs": {"json_object": True}}, ResponseFormat(param="structured_outputs.json_object")),
    ({"structured_outputs": {"regex": "a+"}}, ResponseFormat(regex="a+", param="structured_outputs.regex")),
    (
        {"structured_outputs": {"choice": ["yes", "no"], "regex": None, "disable_any_whitespace": False}},
        ResponseFormat(choices=("yes", "no"), param="structured_outputs.choice"),
    ),
    ({"structured_outputs": {"grammar": GRAMMAR}}, ResponseFormat(ebnf=GRAMMAR, param="structured_outputs.grammar")),
    ({"regex": "a+"}, ResponseFormat(regex="a+", param="regex")),
    ({"ebnf": GRAMMAR}, ResponseFormat(ebnf=GRAMMAR, param="ebnf")),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("fields", "wanted"), FORMATS, ids=[json.dumps(fields)[:50] for fields, _ in FORMATS])
def test_every_format_is_honoured_by_every_api(api: str, fields: dict[str, Any], wanted: ResponseFormat) -> None:
    request = parsed(api, **fields)
    assert request.response_format == wanted and request.dropped == ()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": "a+"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"regex": "a", "ebnf": GRAMMAR}, "ebnf"),
    ({"regex": "a", "structured_outputs": {"regex": "a"}}, "regex"),
    ({"ebnf": ["root"]}, "ebnf"),
    *(({name: "x"}, name) for name in sorted(FORMER_FIELDS)),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_format_that_cannot_be_honoured_is_refused_by_name(api: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedParameter), match=f"'{param.replace('[', '.')[:20]}") as refused:
        parsed(api, **fields)
    assert refused.value.param == param


def test_a_former_field_of_vllm_names_what_replaces_it() -> None:
    with pytest.raises(UnsupportedParameter, match=r"'structured_outputs': \{'regex': \.\.\.\}"):
        parsed("chat", guided_regex="a+")
    assert parsed("chat", guided_regex=None).response_format is None


def test_two_fields_that_demand_a_format_exclude_each_other() -> None:
    both = {"structured_outputs": {"regex": "a"}}
    for api, other in [
        ("chat", {"response_format": {"type": "json_object"}}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ]:
        with pytest.raises(InvalidRequest, match="exclude each other"):
            parsed(api, **other, **both)


@pytest.mark.parametrize("wanted", [wanted for _, wanted in FORMATS])
def test_a_format_is_written_as_a_chat_completion_demands_it(wanted: ResponseFormat) -> None:
    again = parsed("chat", **format_fields(wanted)).response_format
    assert again is not None
    names = ("schema", "regex", "ebnf", "choices")
    assert [getattr(again, name) for name in names] == [getattr(wanted, name) for name in names]
