"""Tools that Anthropic defines and clients run: computer use, bash, text editor, memory.

A request names them by type, without a schema, because Anthropic's models know them. For other models, this module adds
a description and a schema. The arguments match Anthropic's documentation, so the client's own code for the tool works
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.protocols.fields import expect_str, optional_bool, optional_int
from proxy.protocols.messages.schemas import Schema, integer, number, numbers, object_of, one_of, text, truth
from proxy.types import Tool

_CLICKS = ("left_click", "right_click", "middle_click", "double_click")
_FIRST_ACTIONS = (
    *("key", "type", "mouse_move", "left_click_drag", *_CLICKS),
    *("screenshot", "cursor_position"),
)
_LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def client_tool(tool: Mapping[str, Any], name: str) -> Tool | None:
    """Return the tool that a definition in `tools` names by its type; None for an unknown type.

    `name`: the path of the definition. Raises InvalidRequest with the path of a field.
    """
    kind = tool.get("type")
    describe = CLIENT_TOOLS.get(kind) if isinstance(kind, str) else None
    if describe is None:
        return None
    description, parameters = describe(tool, f"{name}.")
    return Tool(expect_str(tool.get("name"), f"{name}.name"), description, parameters)


def _computer(tool: Mapping[str, Any], at: str) -> tuple[str, Schema]:
    sizes = [optional_int(tool, f"display_{side}_px", least=1, at=at) for side in ("width", "height")]
    actions, more = [*_FIRST_ACTIONS], {}
    if tool["type"] != "computer_20241022":
        actions += _LATER_ACTIONS
        more = {
            "scroll_direction": one_of("up", "down", "left", "right", about="Where `scroll` scrolls to."),
            "scroll_amount": integer("How many clicks of the wheel `scroll` takes."),
            "duration": number("Seconds that `hold_key` holds the key, or `wait` waits."),
        }
    if tool["type"] == "computer_20251124" and optional_bool(tool, "enable_zoom", at=at):
        actions.append("zoom")
        more["region"] = numbers("[x0, y0, x1, y1]: the part of the screen that `zoom` shows.")
    properties = {
        "action": one_of(*actions, about="What to do. `screenshot` shows the screen."),
        "coordinate": numbers("[x, y] in pixels from the left and the top edge of the screen."),
        "start_coordinate": numbers("[x, y] where `left_click_drag` begins."),
        "text": text("The text of `type`, the keys of `key` and `hold_key` (such as ctrl+s), or keys held on a click."),
        **more,
    }
    screen = f" The screen has {sizes[0]} x {sizes[1]} pixels." if None not in sizes else ""
    about = f"Use the mouse and the keyboard of a computer, and take screenshots.{screen}"
    return about, object_of(properties, "action")


def _bash(tool: Mapping[str, Any], at: str) -> tuple[str, Schema]:
    restart = truth("True: start the shell anew, without a command.")
    return (
        "Run a command in a bash shell. The shell stays between calls.",
        object_of({"command": text("The command."), "restart": restart}),
    )


def _text_editor(tool: Mapping[str, Any], at: str) -> tuple[str, Schema]:
    commands = ["view", "create", "str_replace", "insert"]
    if tool["type"] in ("text_editor_20241022", "text_editor_20250124"):
        commands.append("undo_edit")
    return "View, create and edit text files.", object_of(_file_fields(commands), "command", "path")


def _memory(tool: Mapping[str, Any], at: str) -> tuple[str, Schema]:
    fields = _file_fields(["view", "create", "str_replace", "insert", "delete", "rename"])
    renamed = {"old_path": text("The path before `rename`."), "new_path": text("The path after `rename`.")}
    return "Keep notes in files below /memories, which outlast the conversation.", object_of(
        fields | renamed, "command"
    )


def _file_fields(commands: list[str]) -> Schema:
    return {
        "command": one_of(*commands, about="What to do."),
        "path": text("The absolute path of the file or folder."),
        "file_text": text("What the file holds after `create`."),
        "old_str": text("The text that `str_replace` replaces; the file has it once."),
        "new_str": text("The text that takes its place."),
        "insert_line": integer("The line after which `insert` writes; 0: before the first."),
        "insert_text": text("What `insert` writes."),
        "view_range": numbers("[first, last]: the lines that `view` shows, from 1; -1: to the end."),
    }


CLIENT_TOOLS: dict[str, Callable[[Mapping[str, Any], str], tuple[str, Schema]]] = {
    **dict.fromkeys(("computer_20241022", "computer_20250124", "computer_20251124"), _computer),
    **dict.fromkeys(("bash_20241022", "bash_20250124"), _bash),
    **{f"text_editor_{day}": _text_editor for day in ("20241022", "20250124", "20250429", "20250728")},
    "memory_20250818": _memory,
}
