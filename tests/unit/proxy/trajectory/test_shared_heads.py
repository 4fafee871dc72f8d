"""Heads that several sessions have are one object, and only identical ones are."""

from __future__ import annotations

import pytest

from proxy.trajectory import shared_heads
from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.recent import RecentConversations
from proxy.trajectory.shared_heads import shared_lead, shared_tools
from proxy.types import Message, Role, Tool
from tests.interactions import interaction


def tools(**parameters: object) -> tuple[Tool, ...]:
    return (Tool("f", "Does it.", dict(parameters)),)


def test_identical_tools_are_one_object() -> None:
    first = shared_tools(tools(a=1, b=[1, None]))
    assert shared_tools(tools(a=1, b=[1, None])) is first


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tools(a=1, b=2), tools(b=2, a=1)),
        (tools(a=1), tools(a=1.0)),
        (tools(a=1), tools(a=True)),
        (tools(a=float("nan")), tools(a=None)),
        ((Tool("f", strict=True),), (Tool("f"),)),
        (tools(a=2**70), tools(a=2**70)),
        (tools(a="x" * 70_000), tools(a="x" * 70_000)),
    ],
    ids=["order", "float", "bool", "null", "strict", "large integer", "large"],
)
def test_tools_that_differ_or_are_large_are_not_shared(one: tuple[Tool, ...], other: tuple[Tool, ...]) -> None:
    shared_tools(one)
    assert shared_tools(other) is other


def test_two_sessions_share_their_system_messages_and_tools() -> None:
    found = []
    for _ in range(2):
        cache, recent = InteractionCache(), RecentConversations()
        conversation = (Message(Role.SYSTEM, "".join(["be", " good"])), Message(Role.USER, "hi"))
        turn = interaction("a")
        turn.new_messages, turn.tools = recent.identify(conversation, tools(), {}).messages, tools(a=1)
        cache.add(cache.place_stored(turn))
        found.append(turn)
    assert found[0].new_messages[0] is found[1].new_messages[0]
    assert found[0].tools is found[1].tools


def test_only_the_latest_heads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_heads, "_KEPT", 2)
    monkeypatch.setattr(shared_heads, "_messages", shared_heads._Latest())  # other tests have filled it
    first = shared_lead((Message(Role.SYSTEM, "0"),))
    for text in ("1", "0", "2"):
        shared_lead((Message(Role.SYSTEM, text),))
    assert shared_lead((Message(Role.SYSTEM, "0"),)) is first
    for text in ("1", "2"):
        shared_lead((Message(Role.SYSTEM, text),))
    assert shared_lead((Message(Role.SYSTEM, "0"),)) is not first
