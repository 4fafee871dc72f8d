"""Long conversations are rendered in a worker thread, short ones on the event loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.rendering import Renderer
from proxy.resources.fair_pool import FairPool
from proxy.resources.memory import FreedMemory
from proxy.sessions.live_session import LiveSession
from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.matching import identify
from proxy.turns.prompts import Prompts
from proxy.types import Api, Ids, Message, Role, Tool, ToolCall, TurnRequest, ids_of

HI = Message(Role.USER, "Hi")
CALLS = tuple(ToolCall(f"call_{number}", "read", "{}") for number in range(300))


class Where:
    """Renders nothing; `inline`: whether it was asked to on the event loop."""

    inline: bool | None = None
    images = None

    def render(self, *_: Any, **options: Any) -> Ids:
        self.inline = threading.current_thread() is threading.main_thread()
        return ids_of([1])


def some_tools(number: int) -> tuple[Tool, ...]:
    """So many tools, or a large one."""
    if number < 0:
        return (Tool("t", "", {"properties": {"p": {"enum": ["x" * 50_000]}}}),)
    return tuple(Tool(f"t{at}") for at in range(number))


@pytest.mark.parametrize(
    ("messages", "tools", "inline"),
    [
        ((HI,), 0, True),
        ((HI,) * 50, 20, True),
        ((Message(Role.USER, "x" * 50_000),), 0, False),
        ((Message(Role.ASSISTANT, "", reasoning="x" * 50_000), HI), 0, False),
        ((HI,) * 300, 0, False),
        ((HI, Message(Role.ASSISTANT, "", CALLS)), 0, False),
        ((HI,), 60, False),
        ((HI,), -1, False),
    ],
    ids=[
        "short",
        "some messages",
        "long text",
        "long reasoning",
        "many messages",
        "many calls",
        "many tools",
        "large tool",
    ],
)
async def test_long_conversations_are_rendered_in_a_thread(
    messages: tuple[Message, ...], tools: int, inline: bool
) -> None:
    where = Where()
    session = SimpleNamespace(id="s", cache=InteractionCache())
    request = TurnRequest(Api.CHAT, "any", messages, tools=some_tools(tools))
    prompts = Prompts(cast(Renderer, where), FairPool(2, FreedMemory()))
    prompt = await prompts.build(cast(LiveSession, session), request, identify(messages, (), {}), 1000)
    assert (prompt.ids.joined, prompt.bridged, where.inline) == (ids_of([1]), False, inline)
