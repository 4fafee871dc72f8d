"""Every field of the openai SDK is in exactly one row of a protocol's table, so a new SDK field fails here first."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from proxy.protocols.chat import protocol as chat
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.responses import protocol as responses
from tests.unit.proxy.protocols.response_bodies import PROTOCOL
from tokengrove.errors import InvalidRequest, UnsupportedParameter

CHAT_FIELDS = {
    *chat_params.CompletionCreateParamsNonStreaming.__annotations__,
    *chat_params.CompletionCreateParamsStreaming.__annotations__,
}
RESPONSES_FIELDS = {
    *responses_params.ResponseCreateParamsNonStreaming.__annotations__,
    *responses_params.ResponseCreateParamsStreaming.__annotations__,
}
TABLES = [(chat, CHAT_FIELDS), (responses, RESPONSES_FIELDS)]


@pytest.mark.parametrize(("module", "fields"), TABLES, ids=["chat", "responses"])
def test_each_field_of_the_sdk_is_in_exactly_one_row(module: Any, fields: set[str]) -> None:
    rows = [module.HONOURED, module.IGNORED, module.REFUSED]
    assert fields, "the SDK's parameter types moved"
    assert {field: sum(field in row for row in rows) for field in fields} == dict.fromkeys(fields, 1)


@pytest.mark.parametrize("module", [chat, responses], ids=["chat", "responses"])
def test_the_table_at_the_top_of_the_module_names_every_field(module: Any) -> None:
    words = set(re.findall(r"\w+", module.__doc__))
    assert (module.HONOURED | module.IGNORED | module.REFUSED) - words == set()


@pytest.mark.parametrize("field", sorted(responses.IGNORED))
def test_an_ignored_field_of_the_responses_api_is_recorded_with_any_value(field: str) -> None:
    for value in ("x", 5, {"a": [None]}, ["b"], True):
        assert PROTOCOL.parse({"model": "m", "input": "hi", field: value}).dropped == (field,)


@pytest.mark.parametrize("field", sorted(chat.IGNORED))
def test_an_ignored_field_of_the_chat_api_is_recorded_with_any_value(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert ChatProtocol().parse({**body, field: {"a": 1}}).dropped == (field,)


@pytest.mark.parametrize(
    "refused",
    [{"background": True}, {"conversation": "c"}, {"prompt": {"id": "p"}}],
    ids=lambda refused: next(iter(refused)),
)
def test_a_refused_field_is_refused_by_name(refused: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        PROTOCOL.parse({"model": "m", "input": "hi", **refused})
    assert caught.value.param in refused
    assert set(refused) <= responses.REFUSED


def test_refused_fields_at_their_defaults_are_accepted() -> None:
    body = {"background": False, "conversation": None, "prompt": None}
    assert PROTOCOL.parse({"model": "m", "input": "hi", **body}).dropped == ()


def test_an_item_of_unknown_type_is_an_error_naming_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        PROTOCOL.parse({"model": "m", "input": [{"type": "mesage", "role": "user", "content": "hi"}]})
    assert caught.value.param == "input[0].type"


def test_a_hosted_item_is_dropped_and_recorded() -> None:
    items = [{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]
    parsed = PROTOCOL.parse({"model": "m", "input": items})
    assert len(parsed.messages) == 1
    assert parsed.dropped == ("input[1] of type web_search_call",)
