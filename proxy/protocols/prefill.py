"""The prefill of a request: its last message, if that is the beginning of an answer that the model is to continue."""

from __future__ import annotations

from proxy.types import Role, ToolChoiceMode, TurnRequest
from tokengrove.errors import InvalidRequest

_FORCED = (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


def take_prefill(request: TurnRequest, name: str) -> None:
    """Move the last message, an assistant message at the path `name`, from `request.messages` to its `prefill`.

    An empty message is dropped: there is nothing to continue. Raises InvalidRequest if it cannot be continued.
    """
    *messages, last = request.messages
    if last.tool_calls:
        message = f"'{name}' calls tools, so it cannot be continued; send their results after it"
        raise InvalidRequest(message, param=name)
    if last.images:
        raise InvalidRequest(f"'{name}' has an image, so it cannot be continued; only text can be", param=name)
    if last.reasoning and not last.content:
        raise InvalidRequest(f"'{name}' has reasoning but no text; only text can be continued", param=name)
    if all(message.role is Role.SYSTEM for message in messages):
        raise InvalidRequest(f"'{name}' is to be continued, but no message precedes it", param=name)
    request.messages = tuple(messages)
    if last.content:
        _check_free(request, name)
        request.prefill = last


def _check_free(request: TurnRequest, name: str) -> None:
    """Raise InvalidRequest if the form of the answer is forced: a grammar starts at the beginning of the answer."""
    if request.tool_choice.mode in _FORCED:
        message = f"'tool_choice' forces a call, but '{name}' begins the answer with text; leave one of them out"
        raise InvalidRequest(message, param="tool_choice")
    if request.response_format is not None:
        raise InvalidRequest(f"'{name}' begins the answer, but its format is forced; leave one of them out", param=name)
