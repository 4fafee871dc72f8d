"""Parses a rendered prompt back into messages and tools, so that a script can answer token ids like a chat.

Only the common form of the ChatML families is parsed: `<|im_start|>role`, tools as JSON lines in `<tools>`, calls in
`<tool_call>`, results in `<tool_response>`. A prompt of another form has no messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from proxy.types import Message, Role, Tool, ToolCall

_START = re.compile(r"<\|im_start\|>(system|user|assistant)\n")
_END = "<|im_end|>"
_TOOLS = "# Tools\n"
_THOUGHT = re.compile(r"^<think>.*?</think>\s*", re.DOTALL)


def read_prompt(text: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Return the complete messages of `text`, in order, and its tools. The beginning of the answer is left out.

    Malformed tools and calls are also left out. The time is linear in the length of the text.
    """
    messages: list[Message] = []
    tools: list[Tool] = []
    for turn in text.split(_END)[:-1]:
        if (start := _START.search(turn)) is None:
            continue
        role, content = Role(start[1]), turn[start.end() :]
        if role is Role.SYSTEM and not messages:
            before, header, after = content.partition(_TOOLS)
            if header and (listed := _between(after, "<tools>\n", "\n</tools>")[0]):
                tools += filter(None, map(_tool, _objects(listed[0].splitlines())))
                content = before.removesuffix("\n\n")
        messages += _messages(role, content)
    return tuple(messages), tuple(tools)


def _messages(role: Role, content: str) -> list[Message]:
    if role is Role.USER and (results := _between(content, "<tool_response>\n", "\n</tool_response>")[0]):
        return [Message(Role.TOOL, result) for result in results]
    if role is Role.ASSISTANT:
        calls, said = _between(_THOUGHT.sub("", content), "<tool_call>\n", "\n</tool_call>")
        return [Message(role, said.strip(), tuple(map(_call, _objects(calls))))]
    return [Message(role, content)]


def _between(text: str, opener: str, closer: str) -> tuple[list[str], str]:
    """Return the texts between each `opener` and the next `closer`, and the rest of the text.

    A regular expression that searches for the closer from every opener would take quadratic time without a closer.
    """
    found, rest, at = [], [], 0
    while (start := text.find(opener, at)) >= 0 and (end := text.find(closer, start + len(opener))) >= 0:
        found.append(text[start + len(opener) : end])
        rest.append(text[at:start])
        at = end + len(closer)
    return found, "".join([*rest, text[at:]])


def _objects(texts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the texts that are JSON objects. Others are skipped, since a model may write malformed JSON."""
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _tool(value: dict[str, Any]) -> Tool | None:
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        return None
    description, parameters = function.get("description"), function.get("parameters")
    return Tool(
        name,
        description if isinstance(description, str) else "",
        parameters if isinstance(parameters, dict) else {},
    )


def _call(value: dict[str, Any]) -> ToolCall:
    return ToolCall("", str(value.get("name", "")), json.dumps(value.get("arguments", {})))
