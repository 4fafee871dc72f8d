"""What headers say about a turn."""

from __future__ import annotations

import pytest

from proxy.api.client_hints import add_headers
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.types import Api, Message, Role, Thread, TurnRequest
from tests.support import user


@pytest.mark.parametrize(
    ("count", "retry"),
    [
        *(("0", False), ("00", False), ("1", True), ("010", True), ("0" * 5000, False), ("9" * 5000, True)),
        *(("-1", False), ("x", False), ("\xb2", False), ("", False)),
    ],
)
def test_a_count_above_zero_marks_a_retry_and_a_malformed_one_is_ignored(count: str, retry: bool) -> None:
    asked = ChatProtocol().parse({"model": "m", "messages": [user("hi")]})
    add_headers(asked, {b"x-stainless-retry-count": count}, None)
    assert asked.retry is retry


@pytest.mark.parametrize(
    ("headers", "thread"),
    [
        ({}, None),
        ({"thread-id": "a"}, Thread("a")),
        ({"thread-id": "b", "x-codex-parent-thread-id": "a"}, Thread("b", "a")),
        ({"x-claude-code-session-id": "s"}, Thread("")),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "b"}, Thread("b", "")),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
            Thread("b", "a"),
        ),
        ({"x-claude-code-session-id": "s", "x-claude-code-parent-agent-id": "a"}, Thread("")),
        ({"x-session-id": "b", "x-parent-session-id": "a"}, Thread("b", "a")),
        ({"thread-id": "b" * 201, "x-codex-parent-thread-id": "a" * 201}, Thread("b" * 200, "a" * 200)),
    ],
)
def test_known_clients_name_their_threads(headers: dict[str, str], thread: Thread | None) -> None:
    asked = TurnRequest(Api.CHAT, "m", (Message(Role.USER, "hi"),))
    add_headers(asked, {name.encode(): value for name, value in headers.items()}, None)
    assert asked.thread == thread
