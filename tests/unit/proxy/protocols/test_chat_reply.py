"""Chat replies with several choices."""

from __future__ import annotations

import json

import pytest

from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, TokenLogprob
from tests.unit.proxy.protocols.message_bodies import answered


def test_the_usage_of_several_choices_counts_the_prompt_once_and_every_output() -> None:
    request = ChatProtocol().parse({"model": "m", "n": 2, "messages": [{"role": "user", "content": "hi"}]})
    usage = ChatProtocol().reply(request, [Answer(answered("x")), Answer(answered("y", output=(2, 3, 4)))])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 5, 10)


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize(
    ("delta", "shown", "logprobs"),
    [
        (TextDelta('say "hi"\n\x00 \U0001f642'), {"content": 'say "hi"\n\x00 \U0001f642'}, None),
        (ReasoningDelta("hm"), {"reasoning_content": "hm"}, None),
        (
            TextDelta("a", (TokenLogprob("a", b"a", -1.0),)),
            {"content": "a"},
            {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}], "refusal": None},
        ),
    ],
)
def test_an_event_holds_the_delta_of_its_choice_and_the_head_of_the_reply(
    delta: Delta, shown: dict[str, str], logprobs: object, usage: bool
) -> None:
    """The model is named like the fields that the event is cut at."""
    model = '"content":null,"reasoning_content":null'
    body = {"model": model, "n": 2, "messages": [{"role": "user", "content": "hi"}]}
    request = ChatProtocol().parse({**body, "stream": True, "stream_options": {"include_usage": usage}})
    sent = ChatProtocol().stream(request, "id", 7, 1).deltas([delta, delta], 1)
    choice = {"index": 1, "delta": shown, "logprobs": logprobs, "finish_reason": None}
    head = {"id": "id", "object": "chat.completion.chunk", "created": 7, "model": model, "system_fingerprint": None}
    event = {**head, "choices": [choice], **({"usage": None} if usage else {})}
    first, second, rest = sent.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: ")) == json.loads(second.removeprefix(b"data: ")) == event
    assert rest == b""
