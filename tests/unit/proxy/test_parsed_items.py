"""A body that begins like an earlier one of its session is parsed as if it came alone, and only where it is new."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.parsed_items import FEWEST, ParsedBodies, ParsedItems
from proxy.protocols.chat import input_messages
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.messages import conversation as messages_conversation
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.responses import input_items
from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.protocols.wire_protocol import WireProtocol
from proxy.types import ImagePart
from tokengrove.errors import InvalidRequest

Items = list[dict[str, Any]]


def chat(items: Items) -> dict[str, Any]:
    return {"model": "m", "messages": items}


def responses(items: Items) -> dict[str, Any]:
    return {"model": "m", "input": items, "instructions": "rules"}


def messages(items: Items) -> dict[str, Any]:
    return {"model": "m", "messages": items, "max_tokens": 1, "system": "rules"}


def chat_turn(number: int) -> Items:
    function = {"name": "read", "arguments": f'{{"line": {number}}}'}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"},
    ]


def responses_turn(number: int) -> Items:
    return [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": f"thought {number}"}]},
        {"type": "function_call", "call_id": f"c{number}", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"},
    ]


def messages_turn(number: int) -> Items:
    call = {"type": "tool_use", "id": f"c{number}", "name": "read", "input": {"line": number}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": [{"type": "text", "text": "found"}]}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


QUESTION = {"role": "user", "content": "find it"}
APIS = [
    pytest.param(ChatProtocol(), chat, chat_turn, input_messages, "parse_message", id="chat"),
    pytest.param(ResponsesProtocol(), responses, responses_turn, input_items, "_add_item", id="responses"),
    pytest.param(MessagesProtocol(), messages, messages_turn, messages_conversation, "parse_message", id="messages"),
]


@pytest.mark.parametrize(("protocol", "body", "turn", "module", "parser"), APIS)
def test_each_item_of_a_long_history_is_parsed_a_few_times_and_not_at_every_turn(
    protocol: WireProtocol, body: Callable[..., Any], turn: Callable[[int], Items], module: Any, parser: str
) -> None:
    """Also if the client marks its last message and takes the mark away in the next turn, as Claude Code does."""
    bodies: ParsedBodies = {}
    history: Items = [QUESTION]
    while len(history) < FEWEST:
        history += turn(len(history))
    protocol.parse(body(history), bodies)
    with patch.object(module, parser, wraps=getattr(module, parser)) as parsed:
        for number in range(1000, 1200):
            history += turn(number)
            marked = [*history[:-1], {**history[-1], "cache_control": {"type": "ephemeral"}}]
            request = protocol.parse(body(copy.deepcopy(marked)), bodies)
        assert parsed.call_count < 200 * 20 < 200 * FEWEST
    assert request == protocol.parse(body(marked))


@pytest.mark.parametrize(("protocol", "body", "turn", "module", "parser"), APIS)
def test_siblings_of_a_long_conversation_parse_what_follows_their_common_part(
    protocol: WireProtocol, body: Callable[..., Any], turn: Callable[[int], Items], module: Any, parser: str
) -> None:
    bodies: ParsedBodies = {}
    history: Items = [QUESTION]
    while len(history) < 4 * FEWEST:
        history += turn(len(history))
    protocol.parse(body(history), bodies)
    with patch.object(module, parser, wraps=getattr(module, parser)) as parsed:
        for number in range(100):
            sibling = protocol.parse(body([*history, {"role": "user", "content": f"way {number}"}]), bodies)
            assert sibling.messages[-1].content == f"way {number}"
        assert parsed.call_count < 100 * 20


values = st.sampled_from([1, 1.0, True, -0.0, 0, False, "1", None, 2**53 + 1])
texts = st.sampled_from(["", "a", "b", "é"])
ITEMS = {
    "chat": st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, texts),
        st.builds(lambda text: {"role": "tool", "content": text}, texts),
        st.builds(lambda text, n: {"role": "tool", "content": text, "tool_call_id": f"c{n}"}, texts, st.integers(0, 2)),
        st.builds(lambda n: chat_turn(n)[0], st.integers(0, 2)),
        st.builds(lambda text: {"role": "assistant", "content": text, "function_call": {"name": text}}, texts),
    ),
    "responses": st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, texts),
        st.builds(lambda text: {"role": "assistant", "content": text}, texts),
        st.builds(lambda n, part: responses_turn(n)[part], st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda n, part: responses_turn(n)[part] | {"id": f"msg_resp_{n}"}, st.integers(0, 2), st.just(1)),
        st.just({"type": "web_search_call"}),
    ),
    "messages": st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, texts),
        st.builds(lambda text: {"role": "assistant", "content": text}, texts),
        st.builds(lambda value: {**messages_turn(0)[0], "content": [called(value)]}, values),
        st.builds(lambda: {"role": "assistant", "content": [{"type": "redacted_thinking"}]}),
        st.builds(lambda n: messages_turn(n)[1], st.integers(0, 2)),
    ),
}


def called(value: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "c", "name": "read", "input": {"line": value}}


@pytest.mark.parametrize(("protocol", "body", "turn", "module", "parser"), APIS)
@given(data=st.data())
def test_the_request_is_the_one_that_parsing_the_whole_body_gives(
    protocol: WireProtocol, body: Callable[..., Any], turn: object, module: object, parser: object, data: st.DataObject
) -> None:
    items = ITEMS[protocol.api.value]
    bodies: ParsedBodies = {}
    history: Items = [QUESTION] * FEWEST
    for _ in range(data.draw(st.integers(1, 6))):
        kept = data.draw(st.sampled_from([len(history), len(history) - 1, len(history) - 10, FEWEST - 2]))
        history = [*history[:kept], *data.draw(st.lists(items, max_size=12)), QUESTION]
        sent = orjson.loads(orjson.dumps(body(history)))
        assert protocol.parse(sent, bodies) == protocol.parse(sent)


@pytest.mark.parametrize(("protocol", "body", "turn", "module", "parser"), APIS)
def test_a_bad_item_is_named_by_its_place_in_the_whole_body(
    protocol: WireProtocol, body: Callable[..., Any], turn: object, module: object, parser: object
) -> None:
    bodies: ParsedBodies = {}
    history: list[Any] = [QUESTION] * FEWEST
    protocol.parse(body(history), bodies)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=rf"\[{FEWEST}\]"):
            protocol.parse(body([*history, "hi"]), bodies)
    protocol.parse(body([*history, QUESTION]), bodies)


class Seen(list[Any]):
    """The items that were parsed."""

    def copy(self) -> Seen:
        return Seen(self)

    def parse(self, items: list[Any], start: int) -> None:
        self.extend(items[start:])


@pytest.mark.parametrize("changed", [{"digest": "b"}, {"at": 1}, {"width": 8}, {"height": 8}, {"detail": "low"}])
def test_an_image_that_differs_in_anything_is_parsed_anew(changed: dict[str, Any]) -> None:
    known, image = ParsedItems[Seen](), ImagePart("a", 0, 4, 4)
    for shown in (image, image._replace(**changed)):
        items = [{"image_url": shown}, *([{"text": "more"}] * 3)]
        assert known.read(items, Seen(), Seen.parse) == items


def test_what_a_client_writes_is_never_taken_for_an_image_that_was_read() -> None:
    known, image = ParsedItems[Seen](), ImagePart("a", 0, 4, 4)
    for shown in (image, {"image": [*image]}, [*image], {"digest": "a"}):
        assert known.read([{"image_url": shown}], Seen(), Seen.parse) == [{"image_url": shown}]
