"""Rewrites the ids of tool calls into the style of a template. A call and its results always get the same id.

Most templates write no ids. Mistral's templates require nine letters or digits, Kimi's `functions.<name>:<number>`, and
clients know neither style. An id that the model itself sampled is kept, so that a result refers to the model's own
tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from proxy.types import Message, ToolCall


class CallIds(StrEnum):
    """The style of call ids that a template requires."""

    GIVEN = "given"
    NINE = "nine letters or digits"
    NUMBERED = "functions.name:number"


# Where sampled ids appear in the output: Kimi, Mistral's newer form, Mistral's older form.
_SAMPLED = (
    re.compile(r"<\|tool_call_begin\|>\s*(functions\.[^\s<:]+:\d+)"),
    re.compile(r"\[CALL_ID\]([A-Za-z0-9]{9})\b"),
    re.compile(r'\[TOOL_CALLS\](?=.*?"id": ?"([A-Za-z0-9]{9})")', re.DOTALL),
)
_NUMBERED = re.compile(r"functions\.[^\s<:]+:\d+")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def rewritten_ids(messages: Sequence[Message], style: CallIds) -> Mapping[str, str]:
    """Return the id to write for each id in `messages` that does not fit `style`."""
    if style is CallIds.GIVEN:
        return {}
    calls = [call for message in messages for call in message.tool_calls]
    if style is CallIds.NUMBERED:
        fits = _NUMBERED.fullmatch
        return {call.id: f"functions.{call.name}:{number}" for number, call in enumerate(calls) if not fits(call.id)}
    given = {call.id for call in calls} | {message.tool_call_id or "" for message in messages}
    return {one: _nine(one) for one in given if not _NINE.fullmatch(one)}


def samples_call_ids(opener: str) -> bool:
    """Return whether models whose calls begin with `opener` sample call ids: Kimi and Mistral do."""
    return opener in ("<|tool_calls_section_begin|>", "[TOOL_CALLS]")


def sampled_call_ids(calls: Sequence[ToolCall], text: Callable[[], str]) -> Mapping[str, str]:
    """Map our id of each call to the id that the model sampled; empty unless it sampled exactly one per call."""
    spoken = text()
    for pattern in _SAMPLED:
        found = pattern.findall(spoken)
        if len(found) == len(calls):
            return {call.id: own for call, own in zip(calls, found, strict=True)}
    return {}


def _nine(one: str) -> str:
    return hashlib.blake2b(one.encode(), digest_size=8).hexdigest()[:9]
