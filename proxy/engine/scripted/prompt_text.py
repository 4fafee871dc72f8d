"""Reads a rendered prompt back into messages and tools, so that a script can answer token ids as it answers a chat.

Only the form that ChatML families share is read: `<|im_start|>role`, tools as JSON lines in `<tools>`, calls in
`<tool_call>`, results in `<tool_response>`. A prompt of another form has no messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from proxy.types import Message, Role, Tool, ToolCall

_TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)
_TOOLS = re.compile(r"(?:\n\n)?# Tools\n.*?<tools>\n(.*?)\n</tools>.*", re.DOTALL)
_THOUGHT = re.compile(r"^<think>.*?</think>\s*", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def read_prompt(text: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Return the messages of `text` that have ended, in order, and its tools; the answer that it begins is left out."""
    messages: list[Message] = []
    tools: list[Tool] = []
    for role, content in _TURN.findall(text):
        if role == "system" and not messages and (found := _TOOLS.search(content)):
            tools += map(_tool, _objects(found[1].splitlines()))
            content = content[: found.start()]
        messages += _messages(Role(role), content)
    return tuple(messages), tuple(tools)


def _messages(role: Role, content: str) -> list[Message]:
    if role is Role.USER and (results := _RESULT.findall(content)):
        return [Message(Role.TOOL, result) for result in results]
    if role is Role.ASSISTANT:
        said = _THOUGHT.sub("", content)
        calls = tuple(_call(call) for call in _objects(_CALL.findall(said)))
        return [Message(role, _CALL.sub("", said).strip(), calls)]
    return [Message(role, content)]


def _objects(texts: list[str]) -> Iterator[dict[str, Any]]:
    """The texts that are JSON objects; what a model wrote need not be."""
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _tool(value: dict[str, Any]) -> Tool:
    function = value.get("function", value)
    return Tool(function["name"], function.get("description", ""), function.get("parameters") or {})


def _call(value: dict[str, Any]) -> ToolCall:
    return ToolCall("", str(value.get("name", "")), json.dumps(value.get("arguments", {})))
