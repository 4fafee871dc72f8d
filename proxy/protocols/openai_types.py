"""What this server does with each type that OpenAI's APIs define: of input items, of content parts, and of tools.

What changes what the model is shown is never left out of a reply with status 200, except tools that only a provider
runs, which are named (`hosted_tools`). A type without an entry is refused. `docs/http-api.md` has these tables, as
`supply.option_tables` writes them; tests compare them with the types of the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief


class Treatment(StrEnum):
    """What becomes of a type.

    `served`: the model sees it as what it is. `context`: another server's tool ran; the model sees its call and result
    as a call and a result. `hosted`: only a provider can run or read it; it is ignored and named, or refused with
    `--hosted-tools refuse`. `refused`: 400 that names it.
    """

    SERVED = "served"
    CONTEXT = "context"
    HOSTED = "hosted"
    REFUSED = "refused"


_SERVED, _CONTEXT, _HOSTED, _REFUSED = Treatment

ITEMS: Mapping[str, Treatment] = {
    "message": _SERVED,
    "reasoning": _SERVED,
    "item_reference": _SERVED,
    "function_call": _SERVED,
    "function_call_output": _SERVED,
    "custom_tool_call": _SERVED,
    "custom_tool_call_output": _SERVED,
    "shell_call": _SERVED,
    "shell_call_output": _SERVED,
    "local_shell_call": _SERVED,
    "local_shell_call_output": _SERVED,
    "apply_patch_call": _SERVED,
    "apply_patch_call_output": _SERVED,
    "computer_call": _SERVED,
    "computer_call_output": _SERVED,
    "tool_search_call": _SERVED,
    "tool_search_output": _SERVED,
    "additional_tools": _SERVED,
    "agent_message": _SERVED,
    "mcp_call": _CONTEXT,
    "code_interpreter_call": _CONTEXT,
    "program": _CONTEXT,
    "program_output": _CONTEXT,
    "file_search_call": _CONTEXT,
    "web_search_call": _HOSTED,
    "image_generation_call": _HOSTED,
    "mcp_list_tools": _HOSTED,
    "mcp_approval_request": _HOSTED,
    "mcp_approval_response": _HOSTED,
    "compaction": _REFUSED,
    "compaction_trigger": _REFUSED,
    "context_compaction": _REFUSED,
    "configuration_update": _REFUSED,
}
"""The input items of the responses API. A call or result that OpenAI's own servers made is `hosted` or `context`."""

_ITEM_WAYS_OUT = {
    "compaction": "only OpenAI can read its 'encrypted_content'; send the items that it stands for, or their summary",
    "context_compaction": "only OpenAI can read its content; send the items that it stands for, or their summary",
    "compaction_trigger": (
        "this server does not compact a conversation for its client; let the client ask for a summary (Codex does, "
        "if the 'name' of its model provider is not OpenAI)"
    ),
    "configuration_update": "give 'reasoning' and 'text' in the body of the request instead",
}

PARTS: Mapping[str, Treatment] = {
    "input_text": _SERVED,
    "output_text": _SERVED,
    "refusal": _SERVED,
    "reasoning_text": _SERVED,
    "summary_text": _SERVED,
    "input_image": _SERVED,
    "encrypted_content": _SERVED,
    "input_file": _REFUSED,
    "input_audio": _REFUSED,
}
"""The content parts of the responses API. Images are for vision models."""

TOOLS: Mapping[str, Treatment] = {
    "function": _SERVED,
    "namespace": _SERVED,
    "custom": _SERVED,
    "shell": _SERVED,
    "local_shell": _SERVED,
    "apply_patch": _SERVED,
    "computer": _SERVED,
    "computer_use_preview": _SERVED,
    "tool_search": _SERVED,
    "web_search": _HOSTED,
    "web_search_2025_08_26": _HOSTED,
    "web_search_preview": _HOSTED,
    "web_search_preview_2025_03_11": _HOSTED,
    "file_search": _HOSTED,
    "mcp": _HOSTED,
    "code_interpreter": _HOSTED,
    "image_generation": _HOSTED,
    "programmatic_tool_calling": _HOSTED,
}
"""The tools of the responses API. A `shell` in a container of OpenAI and a `tool_search` without `execution: client`
are `hosted`, because a provider runs them."""

CHAT_PARTS: Mapping[str, Treatment] = {
    "text": _SERVED,
    "image_url": _SERVED,
    "refusal": _SERVED,
    "input_audio": _REFUSED,
    "file": _REFUSED,
}
"""The content parts of chat completions. Images are for vision models."""

CHAT_TOOLS: Mapping[str, Treatment] = {
    "function": _SERVED,
    "custom": _SERVED,
    **{kind: _HOSTED for kind, treatment in TOOLS.items() if treatment is _HOSTED},
}
"""The tools of chat completions. Those that only a provider runs come from clients of several APIs."""


def item_treatment(kind: str, name: str) -> Treatment:
    """Return what becomes of the input item of this type at the path `name`. Raises if it is refused or unknown."""
    treatment = ITEMS.get(kind)
    if treatment is None:
        raise _unknown(kind, f"{name}.type", ITEMS)
    if treatment is _REFUSED:
        raise UnsupportedParameter(f"'{name}' has type {brief(kind)}: {_ITEM_WAYS_OUT[kind]}", param=name)
    return treatment


def tool_treatment(kind: str, name: str, table: Mapping[str, Treatment]) -> Treatment:
    """Return what becomes of the tool of this type at the path `name`. Raises InvalidRequest for an unknown type."""
    treatment = table.get(kind)
    if treatment is None:
        raise _unknown(kind, f"{name}.type", table)
    return treatment


def part_error(kind: Any, name: str, table: Mapping[str, Treatment]) -> InvalidRequest:
    """Return the error for a content part at the path `name` that no model, or not this one, takes."""
    if isinstance(kind, str) and kind in table:
        return UnsupportedParameter(f"'{name}' has type {brief(kind)}; this model accepts text only", param=name)
    return _unknown(kind, f"{name}.type", table)


def _unknown(kind: Any, name: str, table: Mapping[str, Treatment]) -> InvalidRequest:
    known = ", ".join(kind for kind, treatment in table.items() if treatment is not _REFUSED)
    return InvalidRequest(f"'{name}' is {brief(kind)}; this server accepts {known}", param=name)
