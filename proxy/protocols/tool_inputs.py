"""Arguments of tool calls for APIs that need a JSON object, where a model samples any text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from tokengrove.errors import InvalidRequest

RAW_ARGUMENTS = "_raw"
"""The only key of the object if the arguments are not a JSON object."""
# The only key in which Claude Code returns arguments that it could not parse: {"raw": text, "len": length of the text}.
_UNPARSED = "__unparsedToolInput"


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Text that is not a JSON object goes into `_raw` unchanged."""
    parsed = _object_in(arguments) if arguments.strip() else {}
    return {RAW_ARGUMENTS: arguments} if parsed is None else parsed


def arguments_of(tool_input: Mapping[str, Any], name: str) -> str:
    """Return the JSON text of such an object: the inverse of `input_of` and of Claude Code's own wrapping.

    Raises InvalidRequest if the input is nested too deeply; `name` is its path.
    """
    raw = _raw_arguments(tool_input)
    if raw is not None and _object_in(raw) is None:
        return raw
    return json_text(tool_input, name)


def json_text(value: Any, name: str) -> str:
    """`value` as JSON. Raises InvalidRequest if it is nested too deeply; `name` is its path."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson refuses integers beyond 64 bits and lone surrogates
        pass
    try:
        return json.dumps(value)
    except RecursionError:
        raise InvalidRequest(f"'{name}' is nested too deeply", param=name) from None


def _raw_arguments(tool_input: Mapping[str, Any]) -> str | None:
    """Return wrapped argument text, or None if there is none or the client truncated it."""
    if len(tool_input) != 1:
        return None
    unparsed = tool_input.get(_UNPARSED)
    raw = tool_input.get(RAW_ARGUMENTS)
    if isinstance(unparsed, Mapping):
        raw = unparsed.get("raw")
        if isinstance(raw, str) and unparsed.get("len") not in (None, len(raw)):
            return None
    return raw if isinstance(raw, str) else None


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
