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
from tests.unit.proxy.protocols.message_bodies import body
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
        field, _, inner = name.partition(".")
        MessagesProtocol().parse(body(**{field: {inner or "type": "x"}}))
    assert refusal.value.param == name


@pytest.mark.parametrize("name", sorted(name for name in IGNORED if "." not in name))
def test_ignored_fields_are_recorded(name: str) -> None:
    assert MessagesProtocol().parse(body(**{name: {"type": "x"}})).dropped == (name,)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_choice_of_a_tool_that_only_a_provider_runs_is_refused(choice: dict[str, str]) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(InvalidRequest, match="tool_choice"):
        MessagesProtocol().parse(body(tools=[search], tool_choice=choice))
