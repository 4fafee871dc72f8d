"""Custom tools of the OpenAI APIs: their input is a text. To the model, each is a function with one text, `input`.

A grammar of the input is held by the engine (`Tool.pattern`): in forced calls, and where the model chooses freely.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.protocols.fields import expect_object, expect_str, optional_str
from proxy.protocols.lark import regex_of
from proxy.types import Tool
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

_INPUT = "input"
_SYNTAXES = {"regex": "regular expression", "lark": "Lark grammar"}


def custom_tool(definition: Mapping[str, Any], name: str) -> Tool:
    """Return the function for the custom tool at the path `name`.

    Raises InvalidRequest with the path of a field, and UnsupportedParameter for a grammar that cannot be held.
    """
    description, pattern = optional_str(definition, "description", f"{name}.") or "", None
    if (wanted := definition.get("format")) is not None:
        grammar, pattern = _parse_format(expect_object(wanted, f"{name}.format"), f"{name}.format")
        description = "\n\n".join(filter(None, (description, grammar)))
    text = {"type": "string", "description": "The whole input of the tool, as text."}
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    return Tool(expect_str(definition.get("name"), f"{name}.name"), description, parameters, pattern=pattern)


def input_of(arguments: str) -> str:
    """Return the input in the arguments of a call: the text `input`, or else the arguments as the model wrote them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(_INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input: JSON text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def _parse_format(wanted: Mapping[str, Any], at: str) -> tuple[str, str | None]:
    """Return the words for the model, and the pattern of the input; None for any text.

    The chat API nests the grammar in an object; the responses API does not.
    """
    kind = wanted.get("type")
    if kind == "text":
        return "", None
    if kind != "grammar":
        raise InvalidRequest(f"'{at}.type' must be text or grammar, not {brief(kind)}", param=f"{at}.type")
    if (nested := wanted.get("grammar")) is not None:
        at, wanted = f"{at}.grammar", expect_object(nested, f"{at}.grammar")
    syntax = expect_str(wanted.get("syntax"), f"{at}.syntax")
    definition = expect_str(wanted.get("definition"), f"{at}.definition")
    if syntax not in _SYNTAXES:
        raise InvalidRequest(f"'{at}.syntax' must be regex or lark, not {brief(syntax)}", param=f"{at}.syntax")
    try:
        pattern = regex_of(definition) if syntax == "lark" else definition
    except ValueError as error:
        message = (
            f"'{at}.definition' cannot be held by this server: {error}; write it without that, or leave 'format' out"
        )
        raise UnsupportedParameter(message, param=f"{at}.definition") from None
    return f"The input must match this {_SYNTAXES[syntax]}:\n{definition}", pattern
