"""The toolsets of Anthropic, whose members the client runs: `computer_toolset_20260801`, `browser_toolset_20260801`.

One entry of `tools` offers all members. A call names its member and its toolset, and two toolsets share member names.
So the model sees the function `computer_left_click`, and the API a `tool_use` with the name `left_click` and the
`toolset_name` `computer`. The arguments match the types of Anthropic's SDK, so its tool runner works unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proxy.protocols.fields import expect_object, expect_str, optional_bool
from proxy.protocols.messages.schemas import Schema, integer, number, numbers, object_of, one_of, text, texts
from proxy.types import Tool
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

Member = tuple[str, Schema]
"""A description, and the schema of the arguments."""

_POINT = numbers("[x, y] in pixels from the left and the top edge.")
_HELD = text("Keys that are held meanwhile, such as ctrl+shift.")
_DIRECTION = one_of("up", "down", "left", "right", about="Where to scroll to.")
_AREA = numbers("[x0, y0, x1, y1]: the part that is shown.")


def _computer_click(about: str) -> Member:
    return f"{about} at `coordinate`, or where the cursor is.", object_of({"coordinate": _POINT, "text": _HELD})


_COMPUTER: Mapping[str, Member] = {
    "key": (
        "Press a key or keys together, such as Return or ctrl+s.",
        object_of({"text": text("The keys."), "repeat": integer("How often (default 1).")}, "text"),
    ),
    "hold_key": (
        "Hold a key, or keys together, for some time.",
        object_of({"text": text("The keys."), "duration": integer("Seconds.")}, "text", "duration"),
    ),
    "type": ("Type a text on the keyboard.", object_of({"text": text("The text.")}, "text")),
    "cursor_position": ("Tell where the cursor is.", object_of({})),
    "mouse_move": ("Move the cursor without a click.", object_of({"coordinate": _POINT}, "coordinate")),
    "left_mouse_down": ("Press the left mouse button where the cursor is.", object_of({})),
    "left_mouse_up": ("Release the left mouse button.", object_of({})),
    "left_click": _computer_click("Click with the left mouse button"),
    "left_click_drag": (
        "Drag with the left mouse button from `start_coordinate` to `coordinate`.",
        object_of({"start_coordinate": _POINT, "coordinate": _POINT, "text": _HELD}, "start_coordinate", "coordinate"),
    ),
    "right_click": _computer_click("Click with the right mouse button"),
    "middle_click": _computer_click("Click with the middle mouse button"),
    "double_click": _computer_click("Click twice with the left mouse button"),
    "triple_click": _computer_click("Click three times with the left mouse button"),
    "scroll": (
        "Scroll at `coordinate`, or where the cursor is.",
        object_of(
            {
                "scroll_direction": _DIRECTION,
                "scroll_amount": integer("Clicks of the wheel."),
                "coordinate": _POINT,
                "text": _HELD,
            },
            "scroll_direction",
            "scroll_amount",
        ),
    ),
    "wait": ("Wait.", object_of({"duration": integer("Seconds.")}, "duration")),
    "screenshot": ("Show the screen.", object_of({})),
    "zoom": ("Show a part of the screen, enlarged.", object_of({"region": _AREA}, "region")),
}

_TAB = text("The id of the tab (default: the active tab).")
_PLACE = object_of(
    {
        "type": one_of("coordinate", about="A point of the viewport."),
        "x": integer("Pixels from the left edge."),
        "y": integer("Pixels from the top edge."),
    },
    *("type", "x", "y"),
)
_ELEMENT = object_of(
    {
        "type": one_of("ref", about="An element of the page."),
        "ref": text("The reference that `read_page` or `find` gave it, such as ref_7."),
    },
    *("type", "ref"),
)
_TARGET = {"anyOf": [_PLACE, _ELEMENT]}
_KEYS = text("The keys, such as ctrl+a.")


def _in_tab(about: str, fields: Schema | None = None, *required: str) -> Member:
    return about, object_of({**(fields or {}), "tab_id": _TAB}, *required)


def _browser_click(about: str) -> Member:
    return _in_tab(f"{about} at a point or on an element.", {"target": _TARGET, "modifiers": _HELD}, "target")


_BROWSER: Mapping[str, Member] = {
    "navigate": _in_tab("Open a URL.", {"url": text("The URL, or back, forward or reload.")}, "url"),
    "list_tabs": ("List the open tabs.", object_of({})),
    "new_tab": ("Open an empty tab.", object_of({})),
    "switch_tab": ("Make a tab the active one.", object_of({"tab_id": text("The id of the tab.")}, "tab_id")),
    "close_tab": ("Close a tab.", object_of({"tab_id": text("The id of the tab.")}, "tab_id")),
    "read_page": _in_tab(
        "Read the tree of the page's elements, with references such as ref_7 to act on.",
        {
            "depth": integer("The most levels of the tree (default 15)."),
            "filter": one_of(
                "interactive", "all", about="Only interactive elements, or also those outside of the viewport."
            ),
            "ref": text("The element whose part of the tree is read (default: the page)."),
        },
    ),
    "get_page_text": _in_tab("Read the visible text of the page."),
    "read_console": _in_tab("Read the new lines of the console."),
    "read_network": _in_tab("Read the new network requests."),
    "find": _in_tab("Find elements by a description.", {"query": text("The description.")}, "query"),
    "form_input": _in_tab(
        "Set the value of a form's element.",
        {
            "target": _ELEMENT,
            "value": {"type": ["string", "number", "boolean"], "description": "The value; of a checkbox, a boolean."},
        },
        *("target", "value"),
    ),
    "file_upload": _in_tab(
        "Set the files of a file input; give `paths` or `document_ids`.",
        {"target": _ELEMENT, "paths": texts("Paths of files."), "document_ids": texts("Ids of staged files.")},
        "target",
    ),
    "scroll_to": _in_tab("Scroll an element into view.", {"target": _ELEMENT}, "target"),
    "screenshot": _in_tab("Show the viewport."),
    "zoom": _in_tab("Show a part of the viewport, enlarged.", {"region": _AREA}, "region"),
    "left_click": _browser_click("Click with the left mouse button"),
    "right_click": _browser_click("Click with the right mouse button"),
    "middle_click": _browser_click("Click with the middle mouse button"),
    "double_click": _browser_click("Click twice with the left mouse button"),
    "triple_click": _browser_click("Click three times with the left mouse button"),
    "hover": _in_tab("Move the cursor to a point or an element without a click.", {"target": _TARGET}, "target"),
    "left_click_drag": _in_tab(
        "Drag with the left mouse button from `from` to `target`.",
        {"from": _PLACE, "target": _PLACE},
        *("from", "target"),
    ),
    "left_mouse_down": _in_tab("Press the left mouse button at a point.", {"target": _PLACE}, "target"),
    "left_mouse_up": _in_tab("Release the left mouse button at a point.", {"target": _PLACE}, "target"),
    "mouse_move": _in_tab("Move the cursor to a point without a click.", {"target": _PLACE}, "target"),
    "scroll": _in_tab(
        "Scroll at a point.",
        {
            "target": _PLACE,
            "scroll_direction": _DIRECTION,
            "scroll_amount": integer("Clicks of the wheel, 1 to 10 (default 3)."),
        },
        *("target", "scroll_direction"),
    ),
    "type": _in_tab("Type a text.", {"text": text("The text.")}, "text"),
    "key": _in_tab(
        "Press keys together, or several of them one after the other, with spaces between them.",
        {"text": _KEYS, "repeat": integer("How often (default 1).")},
        "text",
    ),
    "hold_key": _in_tab(
        "Hold keys for some time.",
        {"text": _KEYS, "duration": number("Seconds, at most 30.")},
        *("text", "duration"),
    ),
    "wait": _in_tab("Wait.", {"duration": number("Seconds, at most 30.")}, "duration"),
    "javascript_exec": _in_tab(
        "Run JavaScript in the page and return the value of its last expression.",
        {"text": text("The code, without `return`.")},
        "text",
    ),
}
_OFF = {"browser": frozenset({"file_upload", "read_console", "read_network", "javascript_exec"})}
"""The members that are offered only if `configs` enables them."""
_MEMBERS = {"computer": _COMPUTER, "browser": _BROWSER}
TOOLSETS = {f"{name}_toolset_20260801": name for name in _MEMBERS}
"""The name of the toolset (`toolset_name` of its calls) by its type."""


def toolset_tools(tool: Mapping[str, Any], name: str) -> list[Tool]:
    """The functions of a toolset in `tools`, whose path is `name`. Raises InvalidRequest with the path of a field."""
    toolset = TOOLSETS[tool["type"]]
    members, off = _MEMBERS[toolset], _OFF.get(toolset, frozenset())
    configs = {} if tool.get("configs") is None else expect_object(tool["configs"], f"{name}.configs")
    enabled = {member: member not in off for member in members}
    for member, value in configs.items():
        at = f"{name}.configs.{member}"
        if member not in members:
            message = f"'{at}' is no member of this toolset; the members are {', '.join(members)}"
            raise InvalidRequest(message, param=at)
        config = {} if value is None else expect_object(value, at)
        enabled[member] = optional_bool(config, "enabled", enabled[member], f"{at}.")
        if optional_bool(config, "defer_loading", at=f"{at}."):
            message = f"'{at}.defer_loading' is not supported: the members of a toolset are shown at once; leave it out"
            raise UnsupportedParameter(message, param=f"{at}.defer_loading")
    return [Tool(function_name(toolset, member), *members[member]) for member in members if enabled[member]]


def function_name(toolset: str, member: str) -> str:
    """The name of a member's function."""
    return f"{toolset}_{member}"


def called_function(block: Mapping[str, Any], name: str) -> str:
    """The name of the function that a `tool_use` calls; `name` is its path. Raises InvalidRequest."""
    called, toolset = expect_str(block.get("name"), f"{name}.name"), block.get("toolset_name")
    if toolset is None:
        return called
    if not isinstance(toolset, str) or called not in _MEMBERS.get(toolset, ()):
        message = f"'{name}.toolset_name' {brief(toolset)} has no member {brief(called)}"
        raise InvalidRequest(f"{message}; the toolsets are {', '.join(_MEMBERS)}", param=f"{name}.toolset_name")
    return function_name(toolset, called)


def named_call(function: str, toolsets: Iterable[str]) -> dict[str, str]:
    """The fields of a `tool_use` that name what it calls. `toolsets`: those of the request."""
    for toolset in toolsets:
        member = function.removeprefix(f"{toolset}_")
        if member != function and member in _MEMBERS[toolset]:
            return {"name": member, "toolset_name": toolset}
    return {"name": function}
