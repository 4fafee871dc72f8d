"""The fields of a task that agents of other systems read: the first messages, and a seed that its group shares."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes.task import Task

_MESSAGES = ("messages", "raw_prompt", "prompt")
TEXTS = ("prompt", "instruction", "question", "problem", "problem_statement", "query", "task", "input", "text")
"""The fields in which data sets have the text of a task, in order of preference."""


def messages_of(task: Task) -> list[dict[str, Any]]:
    """The messages that begin a conversation about this task. Raises InvalidRequest for a row without any."""
    if (found := first_messages(task.data)) is None:
        raise InvalidRequest(f"task {task.task_id!r} {without_messages(task.data)}", param="data")
    return found


def first_messages(data: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The list in `messages`, `raw_prompt` or `prompt`, or a user message with the row's text (see `TEXTS`); None
    without.
    """
    for name in _MESSAGES:
        listed = data.get(name)
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            continue
        if all(isinstance(message, Mapping) for message in listed):
            return [dict(message) for message in listed]
    for name in TEXTS:
        if isinstance(text := data.get(name), str):
            return [{"role": "user", "content": text}]
    return None


def without_messages(data: Mapping[str, Any]) -> str:
    """The reason why a row has no messages, as the end of a sentence."""
    return (
        f"has no messages in {', '.join(_MESSAGES)} and no text in {', '.join(TEXTS)}; it has "
        f"{', '.join(map(str, data)) or 'no field'}"
    )


def seed_of(task: Task) -> int:
    """The seed of an environment: `seed` of the row, or a hash of the task's id. It is the same for the whole group."""
    given = task.data.get("seed")
    return zlib.crc32(task.task_id.encode()) >> 1 if given is None else int(given)
