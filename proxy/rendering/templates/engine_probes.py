"""Conversations for which two engines of one chat template must write the same text.

They cover the possible values of conversations, JSON schemas and arguments: each kind of value in each place that
templates read, and characters that engines escape, strip or print in different ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

_ODD = "ǆ²a<b>&'\" \\ \u2028é🙂\x7f\x00\t"
_TEXTS: tuple[str, ...] = (
    "plain",
    "",
    " \n\t\u3000 ",
    f"\n {_ODD}\r\n\n",
    "<think>\n x \n</think>\n\ny",
    "</think>z",
    "<think>open",
)
_TEXTS += ("<tool_response>1</tool_response>", "<|channel|>final<|message|>", "{{ x }} {% if %}", "assistant", "None")
_VALUES: tuple[Any, ...] = (
    True,
    False,
    None,
    0,
    -7,
    2**53 + 1,
    0.1 + 0.2,
    -0.0001,
    "",
    _ODD,
    [],
    {},
    [None, True, 1, _ODD, [], {}],
)
_VALUES += ({"a": None, "items": [1], "keys": "k", _ODD: {"b": [False]}}, [["x"]], [{"type": "string"}], ["a", None])
_KEYWORDS = [
    "type",
    "description",
    "enum",
    "items",
    "oneOf",
    "anyOf",
    "default",
    "nullable",
    "required",
    "properties",
    "additionalProperties",
]


def engine_probes() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the variables of each probe."""
    for name, messages, tools in _conversations():
        for prompt in (True, False):
            yield name, {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    for name, messages, tools in _schemas():
        yield name, {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
    plain = [_said("user", "Hi"), _said("assistant", "Yo", reasoning_content="hm"), _said("user", "Again")]
    for name, options in _options():
        for tools in (None, [_tool({})]):
            given = {"messages": plain, "tools": tools, "documents": None, "add_generation_prompt": True}
            yield f"option {name}", {**given, **options}


def _conversations() -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]]:
    user, tools = _said("user", "Hi"), [_tool({"type": "object", "properties": {"path": {"type": "string"}}})]
    for text in _TEXTS:
        answer, thought = _said("assistant", text), _said("assistant", "Yo", reasoning_content=text, thinking=text)
        called = _said("assistant", text, tool_calls=[_call("call_0", {"path": text})])
        thought_call = {**called, "content": "", "reasoning_content": text, "thinking": text}
        result = _said("tool", text, tool_call_id="call_0", name="read")
        again = _said("user", text)
        yield "user text", [again], None
        yield "system text", [_said("system", text), user], None
        yield "system text and tools", [_said("system", text), user], tools
        yield "answer", [user, answer], None
        yield "earlier answer", [user, answer, again], None
        yield "reasoning", [user, thought], None
        yield "earlier reasoning", [user, thought, again], tools
        yield "tool call", [user, called, result], tools
        yield "reasoning and tool call", [user, thought_call, result], tools
        yield "after tool calls", [user, thought_call, result, thought, again, called, result, again], tools
        yield "late system text", [user, answer, _said("system", text), again], None
        yield "two users", [user, again, answer], None
    for value in _VALUES:
        calls = [_call("call_0", {"path": value, "": value}), _call("call_1", {})]
        results = [_said("tool", "1", tool_call_id=call["id"], name="read") for call in calls]
        yield "argument", [user, _said("assistant", "", tool_calls=calls[:1]), results[0]], tools
        yield "arguments", [user, _said("assistant", "Yo", tool_calls=calls), *results, user], tools
    text_call = {"id": "call_0", "type": "function", "function": {"name": "read", "arguments": f'{{"path": "{_ODD}"}}'}}
    yield "arguments as text", [user, _said("assistant", "", tool_calls=[text_call])], tools


def _schemas() -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    messages = [_said("user", "Hi")]
    kinds = ("string", "number", "integer", "boolean", "array", "object", "null", "other")
    yield "schema types", messages, [_tool({"type": "object", "properties": {kind: {"type": kind} for kind in kinds}})]
    yield "schema", messages, [_tool(_nested()), _tool({}), _tool({"type": "object", "properties": {}}, _ODD)]
    for keyword, value in itertools.product(_KEYWORDS, _VALUES):
        fields = {"type": "array" if keyword == "items" else "string", "description": "d", keyword: value}
        properties = {
            "path": fields,
            "items": {"type": "object", "properties": {"in": fields}},
            "bare": {keyword: value},
        }
        whole = {"type": "object", "properties": properties, "required": ["path"]}
        yield f"schema with {keyword}", messages, [_tool(whole)]
        yield f"parameters with {keyword}", messages, [_tool({**whole, keyword: value})]


def _nested() -> dict[str, Any]:
    leaf = {"type": "string", "enum": ["a", _ODD], "default": "a", "description": _ODD, "nullable": True}
    listed = {"type": "array", "items": {"type": "array", "items": leaf}, "description": ""}
    either = {"oneOf": [leaf, {"type": "object", "properties": {"x": leaf}}, {"type": "integer", "default": 3}]}
    inner = {"type": "object", "properties": {"keys": leaf, "items": listed, "get": either}, "required": ["keys"]}
    several = {"type": ["string", "null"], "anyOf": [leaf, {"type": "null"}], "title": "T", "format": "f"}
    properties = {"a": inner, "b": listed, "c": either, "d": several, _ODD: leaf, "e": {}, "f": {"type": ["integer"]}}
    return {"type": "object", "properties": properties, "required": list(properties), "$defs": {"q": inner}}


def _options() -> Iterator[tuple[str, Mapping[str, Any]]]:
    flags = ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking", "custom_tools", "builtin_tools")
    words = ("reasoning_effort", "model_identity", "date_string", "tools_in_user_message", "documents")
    for name in flags + words:
        for value in (True, False, None, "high", ["browser", "python"]):
            if name != "documents" or value is None:
                yield name, {name: value}
    yield "documents", {"documents": [{"title": _ODD, "text": "t"}]}


def _said(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def _call(call_id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "read", "arguments": dict(arguments)}}


def _tool(parameters: Mapping[str, Any], description: str = "Read a file.") -> dict[str, Any]:
    function = {"name": "read", "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
