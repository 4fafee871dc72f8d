"""Recent conversations: the identity is the one that hashing the whole conversation gives, whatever is kept."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory import matching
from proxy.trajectory.matching import identify
from proxy.trajectory.recent import RecentConversations
from proxy.types import Message, Role, Tool, ToolCall

CALLS = (ToolCall("1", "f", "{}"), ToolCall("2", "g", '{"a": 1.0}'))
messages = st.sampled_from(
    [
        *(Message(role, text) for role in Role for text in ("", "a", " a ", "<think>b</think>a")),
        *(Message(Role.ASSISTANT, "a", reasoning=reasoning, origin="id") for reasoning in (None, "", "b")),
        *(Message(Role.ASSISTANT, tool_calls=calls) for calls in (CALLS, CALLS[::-1], CALLS[:1])),
        *(Message(Role.TOOL, "a", tool_call_id=call_id) for call_id in ("1", "2", None)),
        *(Message(Role.USER, "a", name="tokens:0"), Message(Role.SYSTEM, "a", name="instructions")),
    ]
)
conversations = st.lists(messages, max_size=5).map(tuple)
heads = st.sampled_from([((), {}), ((Tool("f"),), {}), ((), {"effort": "low"})])


@given(conversations, st.lists(st.tuples(st.integers(0, 5), conversations, heads), max_size=12))
def test_the_identity_is_that_of_the_whole_conversation(
    first: tuple[Message, ...], changes: list[tuple[int, tuple[Message, ...], Any]]
) -> None:
    recent, conversation = RecentConversations(), first
    for kept, added, (tools, options) in changes:
        conversation = conversation[:kept] + added
        found = recent.identify(conversation, tools, options)
        assert found.messages == conversation
        assert found.identity == identify(conversation, tools, options)


def test_only_new_messages_are_hashed_and_the_others_are_shared() -> None:
    recent, hashed = RecentConversations(), 0

    def message_key(*arguments: Any) -> int:
        nonlocal hashed
        hashed += 1
        return original(*arguments)

    original = matching.message_key
    history: tuple[Message, ...] = ()
    with patch.object(matching, "message_key", message_key):
        for turn in range(20):
            history = (*history, Message(Role.USER, f"question {turn}"))
            first = recent.identify(tuple(Message(*message) for message in history), (), {})
            again = recent.identify(history, (), {})
            assert all(one is other for one, other in zip(first.messages, again.messages, strict=True))
            side = recent.identify((Message(Role.USER, "side call"), *history[1:]), (), {})
            assert side.identity != first.identity
            history = (*history, Message(Role.ASSISTANT, f"answer {turn}"))
    assert hashed == 20 + 19 + 20 + 19


def test_few_conversations_are_kept() -> None:
    recent = RecentConversations()
    kept = [recent.identify((Message(Role.USER, str(number)),), (), {}) for number in range(9)]
    assert recent.kept == kept[-4:]
    longer = recent.identify((*kept[6].messages, Message(Role.USER, "more")), (), {})
    assert recent.kept == [kept[5], kept[7], kept[8], longer]


def test_what_became_no_turn_is_forgotten_and_what_is_only_counted_leaves_nothing_behind() -> None:
    recent = RecentConversations()
    first = recent.identify((Message(Role.USER, "first"),), (), {})
    longer = (*first.messages, Message(Role.ASSISTANT, "a"), Message(Role.USER, "more"))
    counted = recent.identify(longer, (), {}, keep=False)
    assert counted.identity == identify(longer, (), {})
    assert counted.messages[0] is first.messages[0]
    assert recent.kept == [first]
    refused = recent.identify((Message(Role.USER, "refused"),), (), {})
    assert recent.kept == [first, refused]
    recent.forget(refused.messages)
    assert recent.kept == [first]
