"""Conversations with all that agents use, to compare chat templates with transformers and with library renderers."""

from __future__ import annotations

from proxy.types import Message, Role, Tool, ToolCall


def probe_conversations() -> list[tuple[tuple[Message, ...], tuple[Tool, ...], bool]]:
    """Return conversations with all that agents use, each with its tools and whether a generation prompt follows.

    They cover system messages, tools, calls, results, reasoning, several turns, and text that looks like markers.
    """
    system = Message(Role.SYSTEM, "Be brief.")
    user = Message(Role.USER, "What is in <b>a.txt</b>?\n\n ")
    second = Message(Role.USER, "  And in ünïcode.txt? ")
    answer = Message(Role.ASSISTANT, "Nothing.")
    thought = Message(Role.ASSISTANT, "Let me look.", reasoning="I should read it.")
    one = Message(Role.ASSISTANT, "", (ToolCall("call_0", "read", '{"path": "a.txt", "lines": [1, 2.5, null]}'),))
    two = Message(
        Role.ASSISTANT,
        "Both.",
        (ToolCall("call_1", "read", '{"path": "é"}'), ToolCall("call_2", "list", "{}")),
        reasoning="Two calls.",
    )
    results = (Message(Role.TOOL, "empty", (), "call_1"), Message(Role.TOOL, "[]", (), "call_2"))
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = (Tool("read", "Read a file.", parameters), Tool("list", "List files: <all> & 'more'."))
    return [
        ((user,), (), True),
        ((system, user), (), True),
        ((system, user, answer, second), (), True),
        ((user, thought, second), (), True),
        ((user, answer), (), False),
        ((user, thought), (), False),
        ((system, user), tools, True),
        ((user,), tools, True),
        ((user, one, Message(Role.TOOL, "empty", (), "call_0")), tools, True),
        ((system, user, two, *results), tools, True),
        ((system, user, two, *results, answer, second), tools, True),
    ]
