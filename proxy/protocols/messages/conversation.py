"""Parses the messages of a Messages API body. Adjacent assistant messages are one answer and become one message."""

from __future__ import annotations

from typing import Any

from proxy.parsed_items import ParsedBodies, read_items
from proxy.protocols.messages.blocks import Notes, parse_message
from proxy.types import Api, Message, Role

_PLAIN_FIELDS = 2


class Conversation:
    """The messages parsed so far, and what they hold beside content."""

    __slots__ = ("messages", "notes")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.notes = Notes.empty()

    def copy(self) -> Conversation:
        other = Conversation()
        other.messages, other.notes = self.messages.copy(), self.notes.copy()
        return other

    def parse(self, values: list[Any], start: int = 0) -> None:
        """Add the messages from index `start` on. Raises InvalidRequest with the path of the field."""
        messages, answer = self.messages, Role.ASSISTANT
        for index, value in enumerate(values[start:], start):
            if (
                type(value) is dict
                and len(value) == _PLAIN_FIELDS
                and type(text := value.get("content")) is str
                and value.get("role") == "user"
            ):
                messages.append(Message(Role.USER, text))
                continue
            for message in parse_message(value, f"messages[{index}]", self.notes):
                if message.role is answer and messages and messages[-1].role is answer:
                    messages[-1] = _merged(messages[-1], message)
                else:
                    messages.append(message)


def parse_conversation(values: list[Any], bodies: ParsedBodies | None) -> Conversation:
    """Parse all messages of a body. `bodies`: the parsed items of earlier bodies of the session."""
    return read_items(bodies, Api.MESSAGES, values, Conversation(), Conversation.parse)


def _merged(first: Message, second: Message) -> Message:
    return first._replace(
        content=first.content + second.content,
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning="".join(filter(None, (first.reasoning, second.reasoning))) or None,
        origin=first.origin or second.origin,
    )
