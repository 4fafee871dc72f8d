"""Chat replies with several choices."""

from __future__ import annotations

from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.wire_protocol import Answer
from tests.unit.protocols.message_bodies import answered


def test_the_usage_of_several_choices_counts_the_prompt_once_and_every_output() -> None:
    request = ChatProtocol().parse({"model": "m", "n": 2, "messages": [{"role": "user", "content": "hi"}]})
    usage = ChatProtocol().reply(request, [Answer(answered("x")), Answer(answered("y", output=(2, 3, 4)))])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 5, 10)
