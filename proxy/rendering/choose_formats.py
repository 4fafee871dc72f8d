"""Chooses the tool-call format, the reasoning format and the stop tokens of a model, by probing its chat template.

A tool-call format is chosen if it reads back a call that the template wrote. The family's own format is tried first; it
is used without a probe if the template writes no calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proxy.rendering.choose_template import TemplateChoice
from proxy.rendering.json_files import read_json
from proxy.rendering.reasoning_formats import REASONING_FORMATS, ReasoningFormat, reasoning_format
from proxy.rendering.templates.chat_template import ChatTemplate
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.known_formats import TOOL_FORMATS, tool_format
from proxy.rendering.tool_calls.tool_format import ToolFormat, read_calls
from proxy.types import Message, Role, Tool, ToolCall
from tokengrove.errors import ConfigurationError, InvalidRequest

_NAME, _ARGUMENTS = "probe_tool", '{"probe_key": "value"}'
_TOOL = Tool(_NAME, "", {"type": "object", "properties": {"probe_key": {"type": "string"}}})


def choose_reasoning(choice: TemplateChoice, named: str | None) -> ReasoningFormat | None:
    """Return the reasoning format, or None if the model has none. `named` is `--reasoning-parser`.

    Raises ConfigurationError for an unknown name, listing the known names.
    """
    if named is not None:
        return reasoning_format(named)
    own = REASONING_FORMATS.get(choice.family.reasoning or "")
    if choice.chat is None or isinstance(choice.template, LibraryTemplate):
        return own
    source = choice.chat.source
    known = [own, *REASONING_FORMATS.values()] if own is not None else [*REASONING_FORMATS.values()]
    return next((found for found in known if found.closer in source and found.opener in source), None)


def choose_tool_format(choice: TemplateChoice, named: str | None) -> ToolFormat | None:
    """Return the tool-call format, or None if no known format fits. `named` is `--tool-parser`.

    Raises ConfigurationError for an unknown name, listing the known names.
    """
    if named is not None:
        return tool_format(named)
    own = TOOL_FORMATS.get(choice.family.tool_format or "")
    if choice.chat is None:
        return own
    text = _written_call(choice.chat)
    if text is None:
        return own
    known = dict.fromkeys([own, *TOOL_FORMATS.values()] if own is not None else TOOL_FORMATS.values())
    return next((found for found in known if reads(found, text)), None)


def reads(calls: ToolFormat, text: str) -> bool:
    """Return whether the format `calls` reads `text` as the probe call."""
    found = [(name, json.loads(arguments)) for name, arguments in read_calls(calls, text, (_TOOL,))]
    return found == [(_NAME, json.loads(_ARGUMENTS))]


def _written_call(chat: ChatTemplate) -> str | None:
    """Return the template's text of an assistant message with a tool call, or None if it writes no calls."""
    if chat.capabilities.arguments is None:
        return None
    question = Message(Role.USER, "Probe-user")
    call = Message(Role.ASSISTANT, "", (ToolCall("call_0", _NAME, _ARGUMENTS),))
    try:
        return chat.text([question, call]).partition("Probe-user")[2]
    except InvalidRequest:
        return None


def stop_tokens(tokenizer: Tokenizer, choice: TemplateChoice, folder: Path) -> tuple[int, ...]:
    """Return the ids that end a turn: the library renderer's, else those in the folder's configuration and the family.

    If the template writes none of the configured ids, its own end-of-turn marker is added: some fine-tunes keep the end
    token of their base model. Raises ConfigurationError if there are no ids.
    """
    if isinstance(choice.template, LibraryTemplate):
        return tuple(dict.fromkeys(choice.template.stop_token_ids))
    ids = _configured_ends(tokenizer, folder)
    if choice.chat is not None:
        ids += choice.chat.end_of_turn(ids)
    ids += [token for text in choice.family.ends if (token := tokenizer.token_id(text)) is not None]
    if not ids:
        raise ConfigurationError(
            f"no end token in {folder}: set eos_token_id in generation_config.json; the chat template shows none either"
        )
    return tuple(dict.fromkeys(ids))


def _configured_ends(tokenizer: Tokenizer, folder: Path) -> list[int]:
    ids: list[Any] = [tokenizer.special_token_id("eos_token")]
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return [token for token in ids if isinstance(token, int)]
