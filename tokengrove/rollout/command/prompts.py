"""The prompt of a task, found in the usual fields of data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokengrove.rollout.episodes.task_fields import TEXTS

_CONVERSATIONS = ("prompt", "messages")


def usual_prompt(data: Mapping[str, Any]) -> str | None:
    """The first field of `TEXTS` with a text, or else the texts of the user's messages; None if there is neither."""
    for name in TEXTS:
        if isinstance(value := data.get(name), str):
            return value
    for name in _CONVERSATIONS:
        if texts := _of_user(data.get(name)):
            return "\n\n".join(texts)
    return None


def _of_user(messages: Any) -> list[str]:
    if not isinstance(messages, list):
        return []
    said = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "user"]
    return [message["content"] for message in said if isinstance(message.get("content"), str)]
