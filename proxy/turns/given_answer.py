"""The answer of an external model: a message that arrives as deltas. It has no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.types import Message, Role, ToolCall


class GivenAnswer:
    """Joins deltas to a message, as an `OutputParser` does with tokens.

    `begun`: the beginning of the answer, which the client wrote.
    """

    malformed_calls = 0

    def __init__(self, begun: Message | None) -> None:
        self._begun, self._deltas = begun, list[Delta]()
        self.stop_string: str | None = None
        self.reasoning_tokens = 0

    def add(self, deltas: Iterable[Delta]) -> None:
        """Add the next pieces."""
        self._deltas += deltas

    def finish(self) -> list[Delta]:
        """Nothing is held back until the end."""
        return []

    @property
    def message(self) -> Message:
        """The message so far."""
        text, reasoning = [self._begun.content] if self._begun else [], list[str]()
        calls, arguments = dict[int, ToolCall](), dict[int, list[str]]()
        for delta in self._deltas:
            match delta:
                case TextDelta(piece):
                    text.append(piece)
                case ReasoningDelta(piece):
                    reasoning.append(piece)
                case ToolCallStart(index, call_id, name):
                    calls[index], arguments[index] = ToolCall(call_id, name, ""), []
                case ToolCallArguments(index, piece):
                    arguments[index].append(piece)
        made = tuple(call._replace(arguments="".join(arguments[index])) for index, call in calls.items())
        return Message(Role.ASSISTANT, "".join(text), made, reasoning="".join(reasoning) or None)


def deltas_of(answer: Message) -> Iterator[Delta]:
    """The deltas of a whole message."""
    if answer.reasoning:
        yield ReasoningDelta(answer.reasoning)
    if answer.content:
        yield TextDelta(answer.content)
    for index, call in enumerate(answer.tool_calls):
        yield ToolCallStart(index, call.id, call.name)
        if call.arguments:
            yield ToolCallArguments(index, call.arguments)
        yield ToolCallEnd(index)
