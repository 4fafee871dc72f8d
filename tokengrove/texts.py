"""Texts of a session for people: messages, notes, and text that is safe on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """The text without control characters, which could affect the terminal: they become dots, a carriage return `␍`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "␍" if c == "\r" else "·" for c in text)


def message_text(message: Mapping[str, Any]) -> str:
    """A message of `message_dict` as text for people: its text, then each call on a separate line."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    lines = [message["content"], *(f"{call['name']}({call['arguments']})" for call in calls)]
    return "\n".join(line for line in lines if line)


def notes_text(notes: Mapping[str, Any]) -> str:
    """The notes of a turn on one line."""
    return printable("; ".join(f"{name}: {_value(value)}" for name, value in notes.items()))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return value if isinstance(value, str) else json.dumps(value)
