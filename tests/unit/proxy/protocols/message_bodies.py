"""Request bodies and interactions for the tests of the Messages API."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from proxy.types import Api, Interaction, Message, Role, ToolCall
from tests.interactions import interaction
from tokengrove.reasons import FinishReason

CACHE: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
READ = {
    "name": "Read",
    "description": "reads a file",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
    },
}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 64, "messages": list(messages) or [says("user", "hi")], **more}


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(call_id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def claude_code(*messages: Any, billing: str = "cch=00000", **more: Any) -> dict[str, Any]:
    """Return a body as Claude Code 2.1 sends it."""
    system = [
        text(f"x-anthropic-billing-header: cc_version=2.1.197.f00; cc_entrypoint=cli; {billing};"),
        text("You are Claude Code, Anthropic's official CLI for Claude.", **CACHE),
        text("\nYou are an interactive agent.", **CACHE),
    ]
    user_id = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"})
    return {
        "model": "claude-opus-4-6",
        "messages": list(messages),
        "system": system,
        "tools": [{**READ, "type": None}, {**READ, "name": "Later", "defer_loading": True}],
        "metadata": {"user_id": user_id},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }


def answered(
    content: str = "",
    *calls: ToolCall,
    reasoning: str | None = None,
    finish: FinishReason = FinishReason.STOP,
    name: str = "msg_1",
    output: tuple[int, ...] = (2, 3),
    **more: Any,
) -> Interaction:
    """Return a committed turn with this answer and a prompt of 5 tokens."""
    message = Message(Role.ASSISTANT, content, calls, reasoning=reasoning)
    made = interaction(name, suffix=(1, 1, 1, 1, 1), output=output)
    return replace(made, api=Api.MESSAGES, output=message, finish_reason=finish, **more)
