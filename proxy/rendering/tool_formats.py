"""How models write calls. A format reads the text between its markers, and says what a forced call must look like.

A text that is not exactly one call of the format is no call at all: `read` gives None and the text stays visible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.errors import ConfigurationError
from proxy.types import GrammarPart, Tool


class ToolFormat(Protocol):
    """`opener` and `closer` are the markers around a call; `separator` stands between two calls."""

    @property
    def name(self) -> str: ...
    @property
    def opener(self) -> str: ...
    @property
    def closer(self) -> str: ...
    @property
    def separator(self) -> str: ...

    def read(self, text: str) -> tuple[str, str] | None:
        """Name and arguments (text of a JSON object, as sampled) of the call written as `text`, or None."""

    def body(self, tool: Tool) -> tuple[GrammarPart, ...]:
        """What stands between the markers of a call of `tool`."""


@dataclass(frozen=True, slots=True)
class HermesFormat:
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`: Hermes, Qwen2.5 and Qwen3.

    A call needs a name. Its arguments are an object, or a string that holds one (some fine-tunes encode twice), or
    absent, which means none. The name need not be among the tools: the agent is told, as OpenAI does.
    """

    name: str = "hermes"
    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    separator: str = "\n"

    def read(self, text: str) -> tuple[str, str] | None:
        text = text.strip()
        call = _strict_json(text)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not name:
            return None
        if isinstance(arguments, str):
            return (name, arguments) if isinstance(_strict_json(arguments), dict) else None
        if not isinstance(arguments, dict):
            return None
        return name, _raw_member(text, "arguments") or "{}"

    def body(self, tool: Tool) -> tuple[GrammarPart, ...]:
        head = '\n{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": '
        return (GrammarPart(text=head), GrammarPart(schema=schema_of(tool)), GrammarPart(text="}\n"))


_HERMES = HermesFormat()

TOOL_FORMATS: Mapping[str, ToolFormat] = {"hermes": _HERMES, "qwen": _HERMES, "qwen25": _HERMES, "qwen3": _HERMES}
"""By the names that SGLang, vLLM, verl and ROLL use."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around the reasoning with which an answer may begin."""

    opener: str
    closer: str


_THINK = ReasoningFormat("<think>", "</think>")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": _THINK,
    "qwen3": _THINK,
    "deepseek-r1": _THINK,
    "deepseek_r1": _THINK,
    "glm45": _THINK,
}


def tool_format(name: str) -> ToolFormat:
    """Raises ConfigurationError naming the known ones."""
    if name not in TOOL_FORMATS:
        raise ConfigurationError(f"--tool-parser {name} is not one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ConfigurationError naming the known ones."""
    if name not in REASONING_FORMATS:
        raise ConfigurationError(f"--reasoning-parser {name} is not one of {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of the arguments: an object, also where the client gave none."""
    return tool.parameters or {"type": "object", "properties": {}}


def _strict_json(text: str) -> Any:
    """The value, or None where `text` is not standard JSON (Python would take NaN, agents do not)."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _raw_member(text: str, wanted: str) -> str | None:
    """The text of a member of a valid JSON object, as written; the last one where it is there twice."""
    decoder = json.JSONDecoder()
    at = _skip_space(text, 1)
    found = None
    while text[at] == '"':
        key, at = decoder.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        _, end = decoder.raw_decode(text, start)
        if key == wanted:
            found = text[start:end]
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return found


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at
