"""The differences between a fork and the nearest turn, as lines for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tokengrove.client import TreeNode
from tokengrove.reasons import Differs
from tokengrove.terminal.image_notes import content_with_images
from tokengrove.terminal.text_diff import block, diff
from tokengrove.texts import message_text, printable

Compared = Mapping[str, Any]
"""The part `compared` of a turn, as the server sends it."""


class ReadTurn(Protocol):
    """Reads a turn by id, with the parts in `include`."""

    def __call__(self, name: str, *include: str) -> dict[str, Any]: ...


def summary(compared: Compared) -> Iterator[str]:
    """One line in rich's markup: the nearest turn, the place and the cause; no line without a turn to compare."""
    if compared["nearest"] is None:
        return
    message, nearest = compared["message"], compared["nearest"]["turn"]
    place = ""
    if message:
        of = message["of"]["turn"]
        place = f", message {message['index']} ({message['role']}{'' if of == nearest else f', of turn {of}'})"
    count = f" {message['count']}" if message and message["count"] > 1 else ""
    why = f"{compared['why']}{count}: {_meaning(compared['why'])}"
    yield f"[dim]nearest turn {nearest}{escape(f'{place}, {why}')}[/]"


def _meaning(why: str) -> str:
    return next((word.meaning for word in Differs if word.value == why), "")  # a newer server may have other words


def print_fork(read: ReadTurn, node: TreeNode, compared: Compared, console: Console) -> None:
    """Print the heading of a fork, then both sides of the first difference: `-` the nearest turn, `+` this turn."""
    console.print(f"\n[bold]turn {node.turn} {node.reason}[/]")
    for line in summary(compared):
        console.print(line)
    for text in fork_lines(read, node.id, compared):
        console.print(text)


def fork_lines(read: ReadTurn, name: str, compared: Compared) -> Iterator[Text]:
    """Both sides of the first difference of the turn with this id."""
    yield from _heads(compared)
    yield from _messages(read, name, compared)


def _heads(compared: Compared) -> Iterator[Text]:
    """The tools, template options and tokens that differ."""
    for sign, word in (("-", "removed"), ("+", "added"), ("~", "changed")):
        if names := (compared["tools"] or {}).get(word):
            yield Text(printable(f"{sign} tools {word}: {', '.join(names)}"))
    for sign, side in (("-", "recorded"), ("+", "sent")):
        if (options := compared["template_options"]) is not None:
            yield from block(sign, f"template options: {json.dumps(options[side])}")
        if (token := compared["token"]) is not None:
            text = token[f"{side}_text"]  # None from a database, which has no tokenizer
            shown = "" if text is None else f" {json.dumps(text, ensure_ascii=False)}"
            yield from block(sign, f"from token {token['index']} on: {list(token[side])}{shown}")


def _messages(read: ReadTurn, name: str, compared: Compared) -> Iterator[Text]:
    message = compared["message"]
    if message is None:
        return
    index, count = message["index"], message["count"]
    nearest = read(compared["nearest"]["interaction_id"], "messages")
    recorded = [*nearest["messages"], nearest["output"]][index:]
    sent = read(name, "messages")["messages"][index:]
    if message["why"] == Differs.REMOVED:
        yield from _blocks("-", recorded[:count])
    elif message["why"] == Differs.INSERTED:
        yield from _blocks("+", sent[:count])
    elif not sent or not recorded or sent[0]["role"] != recorded[0]["role"]:
        yield from _blocks("-", recorded[:1])
        yield from _blocks("+", sent[:1])
    elif message["why"] == Differs.TOOL_CALL_ID:
        for sign, side in (("-", recorded[0]), ("+", sent[0])):
            yield from block(sign, f"{message['why']}: {side.get(message['why'])}")
    else:
        yield from diff(_text(recorded[0]), _text(sent[0]))


def _blocks(sign: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    for message in messages:
        yield from block(sign, f"{message['role']}: {_text(message)}")


def _text(message: Mapping[str, Any]) -> str:
    """The text and calls of a message, with a note for each image, so that different images show."""
    return message_text({**message, "content": content_with_images(message)})
