"""Every type of the openai SDK has a row in the tables of types, and the documentation has the same rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionToolUnionParam
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai.types.responses import ResponseOutputMessageParam, ToolParam
from openai.types.responses.response_function_call_output_item_list_param import ResponseFunctionCallOutputItemParam
from openai.types.responses.response_input_content_param import ResponseInputContentParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.response_reasoning_item_param import Content, Summary

from proxy.protocols import openai_types
from proxy.protocols.openai_types import CHAT_PARTS, CHAT_TOOLS, ITEMS, PARTS, TOOLS, Treatment
from proxy.protocols.responses.client_tools import _CALLS, _KNOWN
from tests.unit.proxy.protocols.response_bodies import PROTOCOL
from tokengrove.errors import ProxyError

DOCS = Path(__file__).parents[4] / "docs" / "http-api.md"


def literals(kind: Any) -> set[str]:
    """The texts that a type annotation allows."""
    if isinstance(kind, str):
        return {kind}
    return {text for part in get_args(kind) for text in literals(part)}


def kinds(union: Any) -> set[str]:
    """The values of `type` of all members of a union of the SDK."""
    members: Iterable[Any] = get_args(union) or (union,)
    found = {text for member in members for text in literals(get_type_hints(member)["type"])}
    assert found, "the SDK's types moved"
    return found


answer_parts = get_args(get_args(get_type_hints(ResponseOutputMessageParam)["content"])[0])
SDK = {
    "ITEMS": kinds(ResponseInputItemParam),
    "PARTS": {
        *kinds(ResponseInputContentParam),
        *kinds(ResponseFunctionCallOutputItemParam),
        *(text for part in answer_parts for text in kinds(part)),
        *kinds(Content),
        *kinds(Summary),
    },
    "TOOLS": kinds(ToolParam),
    "CHAT_PARTS": kinds(ChatCompletionContentPartParam) | kinds(ContentArrayOfContentPart),
    "CHAT_TOOLS": kinds(ChatCompletionToolUnionParam),
}


@pytest.mark.parametrize("table", SDK)
def test_each_type_of_the_sdk_has_a_row(table: str) -> None:
    assert SDK[table] - getattr(openai_types, table).keys() == set()


def documented() -> dict[tuple[str, str], set[str]]:
    """The rows of the table of types: the types by what they are, and what becomes of them."""
    rows = re.findall(r"^\| ([a-z ]+) \| (served|context|hosted|refused) \| (`.*`) \|$", DOCS.read_text(), re.MULTILINE)
    return {(what, treatment): set(re.findall(r"`([^`]+)`", types)) for what, treatment, types in rows}


def test_the_documentation_has_the_same_rows() -> None:
    tables: Mapping[str, Mapping[str, Treatment]] = {
        "input items": ITEMS,
        "content parts": PARTS,
        "tools": TOOLS,
        "content parts of a chat": CHAT_PARTS,
        "tools of a chat": CHAT_TOOLS,
    }
    rows: dict[tuple[str, str], set[str]] = {}
    for what, table in tables.items():
        for kind, treatment in table.items():
            rows.setdefault((what, treatment.value), set()).add(kind)
    assert {row: types for row, types in documented().items() if row[0] in tables} == rows


@pytest.mark.parametrize("kind", [kind for kind, treatment in ITEMS.items() if treatment is not Treatment.REFUSED])
def test_no_accepted_item_is_left_out_without_a_note(kind: str) -> None:
    """An empty item of the type becomes a message or a tool, is noted, or is an error that names one of its fields."""
    given = {"type": kind, "role": "user", "content": []} if kind in ("message", "agent_message") else {"type": kind}
    try:
        parsed = PROTOCOL.parse({"model": "m", "input": [given, {"role": "user", "content": "x"}]})
    except ProxyError as error:
        assert (error.param or "").startswith("input[0].")
        return
    assert len(parsed.messages) > 1 or parsed.dropped == (f"input[0] of type {kind}",)


def test_each_tool_that_clients_run_and_its_call_are_served() -> None:
    assert {TOOLS[kind] for kind in _KNOWN} | {ITEMS[kind] for kind in _CALLS} == {Treatment.SERVED}
    assert {ITEMS[f"{kind}_output"] for kind in _CALLS if f"{kind}_output" in ITEMS} == {Treatment.SERVED}
