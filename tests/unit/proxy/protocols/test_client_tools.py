"""Tools that Anthropic defines and clients run: each becomes a function whose arguments the client's code takes."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.protocols.messages.client_tools import CLIENT_TOOLS
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.types import Tool
from tokengrove.errors import InvalidRequest, UnsupportedParameter

SCREEN = {"name": "computer", "display_width_px": 1280, "display_height_px": 800}


def parsed(*tools: dict[str, Any]) -> tuple[Tool, ...]:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "go"}], "tools": list(tools)}
    return MessagesProtocol().parse(body).tools


def properties(tool: Tool) -> dict[str, Any]:
    return dict(tool.parameters["properties"])


@pytest.mark.parametrize("kind", sorted(CLIENT_TOOLS))
def test_each_is_a_function_under_the_clients_name(kind: str) -> None:
    (tool,) = parsed({"type": kind, **SCREEN, "name": "mine"})
    assert tool.name == "mine" and tool.description
    assert set(tool.parameters["required"]) <= properties(tool).keys()


@pytest.mark.parametrize(
    ("kind", "has", "lacks"),
    [
        ("computer_20241022", {"screenshot", "left_click_drag"}, {"scroll", "zoom"}),
        ("computer_20250124", {"screenshot", "scroll", "triple_click", "wait"}, {"zoom"}),
        ("computer_20251124", {"scroll", "hold_key"}, {"zoom"}),
    ],
)
def test_a_computer_has_the_actions_of_its_version(kind: str, has: set[str], lacks: set[str]) -> None:
    (tool,) = parsed({"type": kind, **SCREEN})
    actions = set(properties(tool)["action"]["enum"])
    assert has <= actions and not lacks & actions
    assert "1280 x 800 pixels" in tool.description


def test_zoom_is_offered_where_it_is_enabled() -> None:
    (tool,) = parsed({"type": "computer_20251124", **SCREEN, "enable_zoom": True})
    assert "zoom" in properties(tool)["action"]["enum"] and "region" in properties(tool)


def test_a_schema_of_the_clients_own_wins() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    (tool,) = parsed({"type": "computer_20250124", **SCREEN, "input_schema": schema})
    assert tool.parameters == schema


def test_an_unknown_type_is_refused_with_those_that_are_accepted() -> None:
    with pytest.raises(UnsupportedParameter, match=r"'computer_20990101', .* the types .*computer_20251124") as error:
        parsed({"type": "computer_20990101", **SCREEN})
    assert error.value.param == "tools[0]"


@pytest.mark.parametrize("field", ["display_width_px", "display_height_px"])
def test_a_wrong_size_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"tools\[0\]\.{field}"):
        parsed({"type": "computer_20250124", **SCREEN, field: "wide"})
