"""Chat bodies: fields that have several spellings or set the same thing."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.protocols.chat.protocol import ChatProtocol
from proxy.types import TurnRequest


def parsed(*answers: dict[str, Any], **fields: Any) -> TurnRequest:
    """Parse a body whose last messages are these answers."""
    messages = [{"role": "user", "content": "hi"}, *({"role": "assistant", **answer} for answer in answers)]
    return ChatProtocol().parse({"model": "m", "messages": messages, **fields})


@pytest.mark.parametrize(
    "spelled",
    [
        {"reasoning_content": "hm so"},
        {"reasoning": "hm so"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm "}, {"text": None}, {"text": "so"}]},
    ],
)
def test_reasoning_is_read_under_each_name_that_clients_give_it(spelled: dict[str, Any]) -> None:
    assert parsed({"content": "Yes.", **spelled}).messages[-1].reasoning == "hm so"


@pytest.mark.parametrize(("one", "other"), [(3, 8), (8, 3)])
def test_of_two_limits_of_new_tokens_the_smaller_holds(one: int, other: int) -> None:
    assert parsed(max_tokens=one, max_completion_tokens=other).sampling.max_tokens == 3


def test_template_options_win_over_the_reasoning_effort() -> None:
    assert parsed(reasoning_effort="high").template_options["reasoning_effort"] == "high"
    given = {"reasoning_effort": "low"}
    assert parsed(reasoning_effort="high", chat_template_kwargs=given).template_options["reasoning_effort"] == "low"
