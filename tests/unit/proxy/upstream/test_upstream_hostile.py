"""Streams of external models with any value in the place of any other: an answer or a named failure, never a crash."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from proxy.rendering.deltas import ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.upstream.answer import AnswerParts, UpstreamAnswer
from proxy.upstream.chat_reader import ChatReader
from proxy.upstream.events import Event, json_of
from proxy.upstream.failure import Failure
from proxy.upstream.messages_reader import MessagesReader
from proxy.upstream.responses_reader import ResponsesReader
from tests.unit.proxy.upstream.asking import joined
from tests.upstreams import (
    Spoken,
    chat_answer,
    chat_chunks,
    message_answer,
    message_events,
    response_answer,
    response_events,
)
from tokengrove.options.model import UpstreamApi
from tokengrove.reasons import FinishReason

SAID = Spoken("Let me look.", "Hm.", (("call_a", "look", ('{"at": ', '"sky"}')), ("call_b", "add", ('{"x": 1}',))))
READERS: dict[UpstreamApi, tuple[Any, Any, Any]] = {
    UpstreamApi.CHAT: (ChatReader, chat_chunks, chat_answer),
    UpstreamApi.RESPONSES: (ResponsesReader, response_events, response_answer),
    UpstreamApi.MESSAGES: (MessagesReader, message_events, message_answer),
}
VALUES: list[Any] = [None, True, 0, -1, 1.5, 2**70, "", "x", "stop", "{", [], [None], [[]], {}, {"a": 1}, {"index": []}]
ROUNDS = 400


def disturbed(value: Any, chance: random.Random) -> Any:
    """A copy with another value, or none, in a few places."""
    if chance.random() < 0.02:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        return {name: disturbed(item, chance) for name, item in value.items() if chance.random() > 0.01}
    if isinstance(value, list):
        return [disturbed(item, chance) for item in value]
    return value


def read(api: UpstreamApi, events: list[Any], whole: Any = None) -> UpstreamAnswer | None:
    """The answer of a stream, or of a whole body; None after a failure. Its deltas are checked."""
    parts = AnswerParts()
    reader = READERS[api][0](parts)
    deltas = []
    try:
        if whole is not None:
            reader.whole(json_of(json.dumps(whole).encode()))
        for event in events:
            ended = reader.read(Event("", json.dumps(event).encode()))
            deltas += parts.take()
            if ended:
                break
        answer: UpstreamAnswer = reader.end()
    except Failure:
        return None
    deltas += parts.take()
    opened: int | None = None
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert opened is None or answer.finish in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
            opened = delta.index
        elif isinstance(delta, ToolCallArguments | ToolCallEnd):
            assert delta.index == opened
            opened = None if isinstance(delta, ToolCallEnd) else opened
    told = joined(deltas)
    assert "".join(text for kind, text, *_ in told if kind == "text") == answer.message.content
    for index, call in enumerate(answer.message.tool_calls):
        assert ("call", str(index), call.id, call.name) in told
        assert "".join(text for kind, text, *_ in told if kind == f"arguments {index}") == call.arguments
    return answer


@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize("seed", range(4))
def test_disturbed_streams_and_answers_fail_by_name_or_are_answers(api: UpstreamApi, seed: int) -> None:
    chance = random.Random(seed)
    _, events, whole = READERS[api]
    streamed, plain = events(SAID), whole(SAID)
    assert read(api, streamed) is not None and read(api, [], plain) is not None
    for _ in range(ROUNDS // 4):
        read(api, [disturbed(event, chance) for event in streamed])
        read(api, [], disturbed(plain, chance))
        shuffled = [*streamed]
        first, second = chance.randrange(len(shuffled)), chance.randrange(len(shuffled))
        shuffled[first], shuffled[second] = shuffled[second], shuffled[first]
        read(api, shuffled)
