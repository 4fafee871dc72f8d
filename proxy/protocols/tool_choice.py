"""The check of a tool choice that the OpenAI APIs share: the tools of the request can satisfy it."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.errors import InvalidRequest
from proxy.types import Tool, ToolChoice, ToolChoiceMode


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return `choice` if `tools` can satisfy it. Raises InvalidRequest if it forces a call of a missing tool."""
    names = [tool.name for tool in tools]
    if choice.mode is ToolChoiceMode.REQUIRED and not names:
        raise InvalidRequest("'tool_choice' is required, but 'tools' has no function", param="tool_choice")
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest(f"'tool_choice' names {choice.name!r}, which is not in 'tools'", param="tool_choice")
    return choice
