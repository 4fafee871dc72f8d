"""A body of usual fields is parsed by a short way, and means what it means beside an unusual field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.protocols.sampling_params import NUMBERS
from tokengrove.errors import InvalidRequest

ANYTHING = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e300, "", "text", [], ["a", ""], ["a"], {}, {"a": 1}]
)
NUMBER: st.SearchStrategy[Any] = st.sampled_from([None, 0, 1, 7, 0.0, 0.25, 1.0, -1, 2.5, 1 << 70, "1", True, []])
SOMETIMES: st.SearchStrategy[Any] = st.sampled_from([None, True, False, 0, "true", []])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "nobody"])},
    optional={"content": ANYTHING | st.just([{"type": "text", "text": "part"}]), "name": ANYTHING},
)
MESSAGES = st.lists(MESSAGE, max_size=3) | ANYTHING
USUAL = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]

CHAT = {"stop": ANYTHING, **dict.fromkeys(NUMBERS, NUMBER)}
ANTHROPIC = {
    **{"system": ANYTHING, "stop_sequences": ANYTHING},
    **dict.fromkeys(("max_tokens", "temperature", "top_p", "top_k"), NUMBER),
}
RESPONSES = {
    **dict.fromkeys(("max_output_tokens", "temperature", "top_p"), NUMBER),
    **dict.fromkeys(("instructions", "metadata", "previous_response_id", "store", "user"), ANYTHING),
}
APIS = {
    "chat": (ChatProtocol(), "messages", CHAT),
    "messages": (MessagesProtocol(), "messages", ANTHROPIC),
    "responses": (ResponsesProtocol(), "input", RESPONSES),
}


def parsed(protocol: Any, body: dict[str, Any]) -> Any:
    """The request, or the error of a body that is refused."""
    try:
        return protocol.parse(body)
    except InvalidRequest as error:
        return error


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=400)
@given(data=st.data())
def test_a_usual_body_is_parsed_as_beside_an_unusual_field_without_a_value(api: str, data: st.DataObject) -> None:
    protocol, conversation, fields = APIS[api]
    optional = {"model": ANYTHING, "stream": SOMETIMES, **fields}
    chosen = data.draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    body = {name: data.draw(optional[name], label=name) for name in chosen}
    body[conversation] = data.draw(st.just(USUAL) | MESSAGES, label=conversation)
    if api == "messages":
        body.setdefault("max_tokens", 7)
    found, expected = parsed(protocol, body), parsed(protocol, {**body, "tools": None})
    if isinstance(expected, InvalidRequest):  # which of several faults is told first is not the same
        assert isinstance(found, InvalidRequest)
        assert len(chosen) > 1 or (found.message, found.param) == (expected.message, expected.param)
    else:
        assert found == expected
