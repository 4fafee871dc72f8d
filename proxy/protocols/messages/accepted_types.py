"""What becomes of each type of block, source, tool and edit that the Messages API has.

These tables decide what is accepted, and `supply.option_tables` writes them into docs/http-api.md. A type that no table
has is refused by name. Nothing that would change what the model is shown is ignored, except tools that only a provider
runs, and what the provider itself does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from proxy.protocols.messages.client_tools import CLIENT_TOOLS
from proxy.protocols.messages.toolsets import TOOLSETS


class Treatment(StrEnum):
    """`served`: as the API defines it. `context`: the model reads it. `ignored`: named in `x-tokengrove-ignored`."""

    SERVED = "served"
    CONTEXT = "context"
    IGNORED = "ignored"
    REFUSED = "refused"


class Row(NamedTuple):
    """`how` completes the sentence of the treatment, for documents and, if the type is refused, for its error."""

    treatment: Treatment
    how: str = ""


_SERVED, _CONTEXT, _IGNORED, _REFUSED = Treatment
_CALL = Row(_CONTEXT, "a call of the model in the history")
_RESULT = Row(_CONTEXT, "the result of that call as JSON, its texts as they are; encrypted parts are refused")

BLOCKS: Mapping[str, Row] = {
    "text": Row(_SERVED),
    "image": Row(_SERVED, "by vision models, in messages from the user and in tool results"),
    "document": Row(_SERVED, "as text with its title and context, in messages from the user and in tool results"),
    "search_result": Row(_SERVED, "as text with its title and source, in messages from the user and in tool results"),
    "thinking": Row(_SERVED),
    "tool_use": Row(_SERVED),
    "tool_result": Row(_SERVED),
    "tool_reference": Row(_SERVED, "in tool results: a deferred tool that it names is shown from then on"),
    "browser_state": Row(_SERVED, "as text, in tool results"),
    "server_tool_use": _CALL,
    "mcp_tool_use": _CALL,
    **dict.fromkeys(
        (
            *("web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result", "code_execution_tool_result"),
            *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "mcp_tool_result"),
        ),
        _RESULT,
    ),
    "tool_search_tool_result": Row(_CONTEXT, "like a tool result with its `tool_reference` blocks"),
    "redacted_thinking": Row(_IGNORED, "only its provider can read it"),
    "fallback": Row(_IGNORED, "its provider does not show it either"),
    "mcp_tool_listing": Row(_IGNORED, "only for a provider that runs these tools"),
    "container_upload": Row(_REFUSED, "this server has no containers; send the file's text"),
    "compaction": Row(_REFUSED, "send the summary as a text block, and only the messages after it"),
    **dict.fromkeys(
        ("tool_addition", "tool_removal"), Row(_REFUSED, "list the tools that the model may call in 'tools'")
    ),
}
"""The types of blocks in messages, and in the tool results among them."""

_PDF = Row(_REFUSED, "the model reads no PDF; send its text in a source of type text")
_FILE = Row(_REFUSED, "this server keeps no files")

SOURCES: Mapping[tuple[str, str], Row] = {
    ("image", "base64"): Row(_SERVED),
    ("image", "url"): Row(_SERVED, "with `--allow-image-urls`"),
    ("image", "file"): _FILE,
    ("document", "text"): Row(_SERVED, "`media_type` text/plain"),
    ("document", "content"): Row(_SERVED, "a text, or text blocks and, for vision models, images"),
    ("document", "base64"): _PDF,
    ("document", "url"): _PDF,
    ("document", "file"): _FILE,
}
"""The types of sources, each with the type of its block."""

_EDIT = Row(_REFUSED, "nothing here removes parts of a conversation")

EDITS: Mapping[str, Row] = {
    "clear_thinking_20251015": Row(_IGNORED, "the chat template decides which earlier reasoning it shows"),
    "clear_tool_uses_20250919": _EDIT,
    "compact_20260112": _EDIT,
}
"""The types of edits in `context_management`."""

_PROVIDERS = Row(_IGNORED, "only a provider runs it")
_SEARCH = Row(_IGNORED, "only a provider runs it; tools with `defer_loading` are then shown at once")
SEARCH_TOOLS = frozenset(
    f"tool_search_tool_{kind}{version}" for kind in ("bm25", "regex") for version in ("", "_20251119")
)

TOOLS: Mapping[str, Row] = {
    "custom": Row(_SERVED, "and a tool without a type"),
    **dict.fromkeys(CLIENT_TOOLS, Row(_SERVED, "with a description and a schema of this server")),
    **dict.fromkeys(TOOLSETS, Row(_SERVED, "as one function for each enabled member")),
    **dict.fromkeys(sorted(SEARCH_TOOLS), _SEARCH),
    **dict.fromkeys((f"web_search_{day}" for day in ("20250305", "20260209", "20260318")), _PROVIDERS),
    **dict.fromkeys((f"web_fetch_{day}" for day in ("20250910", "20260209", "20260309", "20260318")), _PROVIDERS),
    **dict.fromkeys((f"code_execution_{day}" for day in ("20250522", "20250825", "20260120", "20260521")), _PROVIDERS),
    "advisor_20260301": _PROVIDERS,
    "mcp_toolset": _PROVIDERS,
}
"""The types of tools. A tool of any type with an `input_schema` is served as a function."""
