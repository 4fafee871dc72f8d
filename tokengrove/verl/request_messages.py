"""Messages of verl's loops in the format of requests: verl's tool calls and results have no ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def as_requested(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with ids for calls and results without one, in order, and arguments as JSON text."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    for at, message in enumerate(messages):
        copied = dict(message)
        if calls := message.get("tool_calls"):
            copied["tool_calls"] = [_call(call, f"call_{at}_{index}") for index, call in enumerate(calls)]
            waiting = [call["id"] for call in copied["tool_calls"]]
        if message.get("role") == "tool":
            following = waiting.pop(0) if waiting else f"call_{at}"
            copied["tool_call_id"] = message.get("tool_call_id") or following
        made.append(copied)
    return made


def _call(call: Mapping[str, Any], given: str) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "id": call.get("id") or given, "type": "function", "function": function}
