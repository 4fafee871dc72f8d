"""The table at the top of messages/protocol.py covers every field that the anthropic SDK knows."""

from __future__ import annotations

import re
import typing
from typing import Any

import anthropic.types as plain
import anthropic.types.beta as beta
import pytest
from anthropic.types import message_count_tokens_params as count
from anthropic.types import message_create_params as create
from anthropic.types import tool_choice_param
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_create

from proxy.protocols.messages import protocol as messages
from proxy.protocols.messages.protocol import HONOURED, IGNORED, REFUSED, MessagesProtocol
from tests.unit.proxy.protocols.message_bodies import READ, body, says
from tokengrove.errors import InvalidRequest, UnsupportedParameter

BODIES = [
    create.MessageCreateParamsStreaming,
    create.MessageCreateParamsNonStreaming,
    count.MessageCountTokensParams,
    beta_create.MessageCreateParamsStreaming,
    beta_create.MessageCreateParamsNonStreaming,
    beta_count.MessageCountTokensParams,
]
NESTED = [
    ("tools.", (plain.ToolParam, beta.BetaToolParam)),
    ("output_config.", (plain.OutputConfigParam, beta.BetaOutputConfigParam)),
    ("thinking.", (plain.ThinkingConfigParam, beta.BetaThinkingConfigParam)),
    ("tool_choice.", (tool_choice_param.ToolChoiceParam, beta.BetaToolChoiceParam)),
]


def fields(kind: Any) -> set[str]:
    """Return the fields of a parameter type, or of all members of a union."""
    members = typing.get_args(kind) or (kind,)
    return {name for member in members for name in typing.get_type_hints(member)}


def kinds(union: Any) -> set[str]:
    """Return the values of `type` in a union of blocks or tools, nested unions included."""
    if members := typing.get_args(union):
        return {kind for member in members for kind in kinds(member)}
    if hasattr(union, "model_fields"):  # the SDK takes its own reply blocks back
        hint = union.model_fields["type"].annotation
    else:
        hint = typing.get_type_hints(union).get("type") if isinstance(union, type) else None
    return {value for value in typing.get_args(hint) if isinstance(value, str)}


def test_every_field_is_in_one_row() -> None:
    assert not HONOURED & IGNORED
    assert not HONOURED & REFUSED
    assert not IGNORED & REFUSED


def test_the_rows_are_those_of_the_docstring() -> None:
    told = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)?", messages.__doc__ or ""))
    rows = HONOURED | IGNORED | REFUSED
    heads = {name.partition(".")[0] for name in told}
    assert {name for name in rows if name.rpartition(".")[2] not in told and name not in told | heads} == set()


@pytest.mark.parametrize("kind", BODIES)
def test_every_request_field_of_the_sdk_has_a_row(kind: Any) -> None:
    assert fields(kind) - HONOURED - IGNORED - REFUSED == set()


@pytest.mark.parametrize(("prefix", "types"), NESTED)
def test_every_nested_field_of_the_sdk_has_a_row(prefix: str, types: tuple[Any, ...]) -> None:
    names = {prefix + name for kind in types for name in fields(kind)}
    assert names - HONOURED - IGNORED - REFUSED == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=f"'{name}'") as refusal:
        MessagesProtocol().parse(body(**{name: {"type": "x"}}))
    assert refusal.value.param == name


@pytest.mark.parametrize("name", sorted(name for name in IGNORED if "." not in name))
def test_ignored_fields_are_recorded(name: str) -> None:
    assert MessagesProtocol().parse(body(**{name: {"type": "x"}})).dropped == (name,)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_every_block_of_the_sdk_is_accepted_or_refused_by_name(role: str) -> None:
    taken = {"user": {"text", "tool_result"}, "assistant": {"text", "thinking", "redacted_thinking", "tool_use"}}
    for kind in kinds(plain.ContentBlockParam) | kinds(beta.BetaContentBlockParam):
        if kind not in taken[role]:
            with pytest.raises(UnsupportedParameter, match=kind) as refusal:
                MessagesProtocol().parse(body(says(role, [{"type": kind, "text": "x"}]), says("user", "x")))
            assert refusal.value.param == "messages[0].content[0]"


CLIENT_TOOLS = {
    *(f"computer_{day}" for day in ("20241022", "20250124", "20251124")),
    *(f"text_editor_{day}" for day in ("20241022", "20250124", "20250429", "20250728")),
    *("bash_20241022", "bash_20250124", "memory_20250818"),
}
SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor", "mcp_toolset")


def test_of_the_typed_tools_of_the_sdk_those_of_a_server_are_dropped_and_those_without_a_known_schema_refused() -> None:
    known = kinds(plain.ToolUnionParam) | kinds(beta.BetaToolUnionParam)
    assert {"bash_20250124", "web_search_20250305"} <= known
    assert known >= CLIENT_TOOLS
    for kind in known - {"custom"}:
        asked = body(tools=[READ, {"type": kind, "name": "t"}])
        if kind.startswith(SERVER_TOOLS):
            request = MessagesProtocol().parse(asked)
            assert [tool.name for tool in request.tools] == ["Read"]
            assert request.dropped == (f"tools[1] of type {kind}",)
        elif kind in CLIENT_TOOLS:
            assert [tool.name for tool in MessagesProtocol().parse(asked).tools] == ["Read", "t"]
        else:
            with pytest.raises(UnsupportedParameter, match=kind) as refusal:
                MessagesProtocol().parse(asked)
            assert refusal.value.param == "tools[1]"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_choice_of_a_tool_that_only_a_provider_runs_is_refused(choice: dict[str, str]) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(InvalidRequest, match="tool_choice"):
        MessagesProtocol().parse(body(tools=[search], tool_choice=choice))
