"""Items of tools that another server ran, whose results can be read: to the model, a call and its result.

They are part of the conversation that the model continues, so they are shown; no tool of this name need exist here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.types import Message, Role, ToolCall


def is_hosted_search(item: Mapping[str, Any]) -> bool:
    """Whether an item is part of a search for tools that a provider ran."""
    return item.get("type") in ("tool_search_call", "tool_search_output") and item.get("execution") == "server"


def hosted_call(item: Mapping[str, Any], kind: str, name: str) -> tuple[ToolCall | None, Message | None]:
    """Return the call and the result in the item of type `kind` at the path `name`; None for what it does not have.

    Raises InvalidRequest with the path of a field.
    """
    at = f"{name}."
    called = optional_str(item, "call_id", at) or optional_str(item, "id", at) or ""
    match kind:
        case "program":
            return _call(called, "programmatic_tool_calling", {"code": expect_str(item.get("code"), f"{at}code")}), None
        case "program_output":
            return None, Message(Role.TOOL, expect_str(item.get("result"), f"{at}result"), tool_call_id=called)
        case "mcp_call":
            call = ToolCall(
                called, expect_str(item.get("name"), f"{at}name"), expect_str(item.get("arguments"), f"{at}arguments")
            )
            failed = "" if item.get("error") is None else _json({"error": item["error"]})
            text = optional_str(item, "output", at) or failed
        case "code_interpreter_call":
            call = _call(called, "code_interpreter", {"code": optional_str(item, "code", at) or ""})
            text = _logs(item, at)
        case _:
            call = _call(called, "file_search", {"queries": expect_list(item.get("queries"), f"{at}queries")})
            text = _found(item, at)
    return call, Message(Role.TOOL, text, tool_call_id=called)


def _logs(item: Mapping[str, Any], at: str) -> str:
    """The logs of a program. An image among its outputs is named by its URL, which is not read."""
    texts: list[str] = []
    for index, value in enumerate(expect_list(item.get("outputs") or [], f"{at}outputs")):
        output, path = expect_object(value, f"{at}outputs[{index}]"), f"{at}outputs[{index}]."
        texts.append(optional_str(output, "logs", path) or optional_str(output, "url", path) or "")
    return "\n".join(texts)


def _found(item: Mapping[str, Any], at: str) -> str:
    """The texts that a file search found, each after the name of its file."""
    texts: list[str] = []
    for index, value in enumerate(expect_list(item.get("results") or [], f"{at}results")):
        found, path = expect_object(value, f"{at}results[{index}]"), f"{at}results[{index}]."
        texts += (optional_str(found, "filename", path) or "", optional_str(found, "text", path) or "")
    return "\n".join(filter(None, texts))


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(call_id, name, _json(arguments))


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
