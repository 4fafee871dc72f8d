"""One turn for a terminal: its figures, the reason and difference of a fork, then its conversation with the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tokengrove.reasons import Reason
from tokengrove.terminal import figures
from tokengrove.terminal.forks import ReadTurn, fork_lines, summary
from tokengrove.terminal.image_notes import content_parts, content_with_images
from tokengrove.texts import notes_text, printable

_LISTED = 100
"""Characters shown of a message that an earlier turn has."""
_IMAGE = "bold blue"
"""Distinguishes the note of an image from the same words in a text."""
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_turn(read: ReadTurn, turn: Mapping[str, Any], console: Console, *, whole: bool = False) -> None:
    """Print a turn that has `messages`, `times` and `compared`.

    Messages that the parent also has are listed in one line each, unless `whole`. `read`: reads other turns.
    """
    above = 0
    if turn["parent_id"] is not None and not whole:
        above = len(read(turn["parent_id"], "messages")["messages"]) + 1
    console.print(heading(turn))
    console.print(_facts(turn))
    compared = turn["compared"]
    if compared["nearest"]:
        console.print(Text.from_markup("\n".join(summary(compared))))
        for line in fork_lines(read, turn["interaction_id"], compared):
            console.print(line)
    for part in _conversation(turn, above):
        console.print(part)


def heading(turn: Mapping[str, Any]) -> Text:
    """The heading of a turn: its number, reason, session and id."""
    name = "an attempt" if turn["turn"] is None else f"turn {turn['turn']}"
    colour = "bold" if turn["status"] == "complete" else "bold red"
    title = f"{name} {turn['reason']}" if turn["turn"] is not None else f"{name} that {_became(turn['status'])}"
    return Text.assemble((title, colour), f" of session {printable(turn['session_id'])}, {turn['interaction_id']}")


def _became(status: str) -> str:
    return {"failed": "failed", "aborted": "was aborted", "superseded": "was superseded"}.get(status, f"is {status}")


def _facts(turn: Mapping[str, Any]) -> Table:
    """The figures of a turn, one line per kind."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(turn):
        table.add_row(name, Text(text, style="red" if name == "error" else ""))
    return table


def _rows(turn: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if turn["error"]:
        yield "error", printable(turn["error"])
    yield "asked by", _asked(turn)
    yield "tokens", _tokens(turn)
    yield "time", _time(turn["times"], turn["output_tokens"])
    rewards = [f"reward {figures.number(turn['reward'])}", *_named(turn["rewards"])]
    yield "reward", ", ".join([*rewards, f"return {figures.number(turn['return'])}"])
    if sampling := {name: value for name, value in turn["sampling"].items() if value not in (None, {}, [])}:
        yield "sampling", printable(", ".join(f"{name} {value}" for name, value in sampling.items()))
    if turn["template_options"]:
        yield "template", printable(", ".join(f"{name} {value}" for name, value in turn["template_options"].items()))
    notes = dict(turn["notes"])
    if recorded := notes.pop("replay", None):
        yield "recorded", printable(", ".join(_recorded(name, missing) for name, missing in recorded.items()))
    if notes:
        yield "notes", notes_text(notes)
    if turn["turn"] is not None:
        yield "place", _meaning(turn)


def _recorded(column: str, missing: int) -> str:
    """A side column in words, with the number of its missing rows."""
    return column.replace("_", " ") + (f" ({missing:,} missing)" if missing else "")


def _asked(turn: Mapping[str, Any]) -> str:
    parts = [f"{turn['api']} API", f"model {turn['model']}", f"purpose {turn['purpose']}"]
    if turn["agent"]:
        parts.append(f"agent {turn['agent']}")
    if turn.get("route"):
        parts.append(f"route {turn['route']} ({turn['route_kind']})")
    return printable(", ".join(parts))


def _tokens(turn: Mapping[str, Any]) -> str:
    cached = "" if turn["cached_tokens"] is None else f" ({turn['cached_tokens']} cached)"
    reasoning = f" ({turn['reasoning_tokens']} of reasoning)" if turn["reasoning_tokens"] else ""
    versions = sorted({version for _, version in turn["versions"]})
    weights = "" if not versions else f", weight version {' and '.join(map(str, versions))}"
    trained = "" if turn["trainable"] else ", marked as not trainable"
    stop = f" at {printable(repr(turn['stop_string']))}" if turn["stop_string"] else ""
    finish = turn["finish_reason"] or "no end"
    sampled = f"{turn['output_tokens']} sampled{reasoning}"
    return f"{turn['prompt_tokens']} of prompt{cached} + {sampled}, {finish}{stop}{weights}{trained}"


def _time(times: Mapping[str, float | None], tokens: int) -> str:
    """The start, the time to the first token, and the tokens per second after it."""
    begun, first, end = times["created_at"], times["first_token_at"], times["completed_at"]
    parts = [] if begun is None else [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun))]
    if begun is not None and first is not None:
        parts.append(f"first token after {figures.seconds(first - begun)}")
    if begun is not None and end is not None:
        parts.append(f"{figures.seconds(end - begun)} in all")
    if first is not None and end is not None and end > first and tokens > 1:
        parts.append(f"{(tokens - 1) / (end - first):.0f} tokens/s")
    return ", ".join(parts) or figures.NONE


def _named(rewards: Mapping[str, float]) -> list[str]:
    return [printable(f"{name} {figures.number(value)}") for name, value in rewards.items()]


def _meaning(turn: Mapping[str, Any]) -> str:
    """The reason in words."""
    words = next((word.meaning for word in Reason if word.value == turn["reason"]), "")
    aligned = "" if turn["parent_id"] is None or turn["aligned"] else " Its prompt does not begin with those tokens."
    return f"{turn['reason']}: {words}{aligned}"


def _conversation(turn: Mapping[str, Any], above: int) -> Iterator[RenderableType]:
    if turn["tools"]:
        names = ", ".join(tool["function"]["name"] for tool in turn["tools"])
        yield Text.assemble(("\ntools ", "dim"), figures.one_line(names, 2000))
    if turn["messages"][:above]:
        yield Text("\nbefore that", "dim")
    for message in turn["messages"][:above]:
        yield Text.assemble(
            (f"{message['role']} ", _style(message)), (figures.one_line(_spoken(message), _LISTED), "dim")
        )
    for message in turn["messages"][above:]:
        yield from message_view(message, "")
    yield from message_view(turn["output"], " (sampled)")


def message_view(message: Mapping[str, Any], beside: str) -> Iterator[RenderableType]:
    """A message in full: its role, reasoning, text and calls. `beside`: text next to the role."""
    names = [str(message[name]) for name in ("name", "tool_call_id") if message.get(name)]
    head = printable(" ".join([message["role"], *names])).replace("\n", "↵")
    yield Text.assemble((f"\n{head}", f"bold {_style(message)}"), (beside, "dim"))
    if reasoning := message.get("reasoning_content"):
        yield Text.assemble(("reasoning: ", "italic"), printable(reasoning), style="dim italic")
    if content := list(content_parts(message)):
        yield Text.assemble(*[(printable(text), _IMAGE if is_image else "") for text, is_image in content])
    yield from _calls(message.get("tool_calls", ()))
    if not any(message.get(name) for name in ("content", "reasoning_content", "tool_calls", "images")):
        yield Text("(empty)", "dim")


def _calls(calls: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    for call in calls:
        of = call["function"]
        text = printable(f"{of['name']}({of['arguments']})")
        yield Text.assemble(("→ ", "bold yellow"), text, (printable(f"  {call['id']}"), "dim"))


def _spoken(message: Mapping[str, Any]) -> str:
    """The text and calls of a message, as one text."""
    calls = [f"→ {call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())]
    return " ".join([content_with_images(message), *calls]).strip()


def _style(message: Mapping[str, Any]) -> str:
    return _ROLES.get(message["role"], "white")
