"""Request bodies and interactions for the tests of Google's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.types import Api, Interaction, Message, Role, ToolCall
from tests.interactions import interaction
from tokengrove.reasons import FinishReason

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "adds", "parametersJsonSchema": SCHEMA}


def body(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"contents": list(contents) or [user(text("hi"))], **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"text": words, **more}


def call(name: str = "add", **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"a": 1}, **more}}


def result(name: str = "add", response: Any = None, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"result": "2"} if response is None else response, **more}}


def config(**fields: Any) -> dict[str, Any]:
    return body(generationConfig=fields)


def answered(
    content: str = "",
    *calls: ToolCall,
    reasoning: str | None = None,
    finish: FinishReason = FinishReason.STOP,
    **more: Any,
) -> Interaction:
    """Return a committed turn with this answer and a prompt of 5 tokens."""
    message = Message(Role.ASSISTANT, content, calls, reasoning=reasoning)
    made = interaction("gen_1", suffix=(1, 1, 1, 1, 1), output=(2, 3))
    return replace(made, api=Api.GOOGLE, output=message, finish_reason=finish, **more)
