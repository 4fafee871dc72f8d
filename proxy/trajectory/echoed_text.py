"""The text of an echo, compared with the text and the reasoning of our answers.

Tags around reasoning, CRLF for LF, outer white space, and where a text is split or joined do not count; every other
character does.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.trajectory.matching import visible
from proxy.types import Message
from tokengrove.reasons import Echo

# Tags that clients write around reasoning, and how many of them are taken from one end of a text.
_NAMES = ("think", "thinking", "thought", "reasoning", "mm:think", "seed:think")
_TAGS = (
    *(f"<{slash}{name}>" for name in _NAMES for slash in ("", "/")),
    *("[THINK]", "[/THINK]", "\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
_MOST_TAGS = 4


def compare_text(ours: Sequence[Message], pieces: Sequence[str]) -> set[Echo] | None:
    """Return how the text of an echo differs from our answers, or None if it is the client's own."""
    content = "".join(answer.content for answer in ours)
    calls = sum(len(answer.tool_calls) for answer in ours)
    if not any(pieces):
        return {Echo.TEXT_DROPPED} if content.strip() else set()
    if visible("".join(pieces)) == visible(content):
        return set()
    text, said = trimmed([answer.content for answer in ours]), trimmed(pieces)
    reasoning = trimmed([answer.reasoning or "" for answer in ours])
    both = trimmed([part for answer in ours for part in (answer.reasoning or "", answer.content)])
    if not said:
        return {Echo.TEXT_DROPPED} if text else set()
    forms: tuple[tuple[list[str], set[Echo]], ...] = (
        (text, set()),
        (both, {Echo.REASONING_AS_TEXT}),
        (text + reasoning, {Echo.REASONING_AS_TEXT}),
        (reasoning, {Echo.REASONING_AS_TEXT, Echo.TEXT_DROPPED}),
    )
    for parts, kinds in forms:
        if _same(said, parts):
            return kinds
        # A client that makes a message of each call may repeat the text in each.
        if _same(said, parts * calls):
            return kinds | {Echo.SPLIT}
    return None


def trimmed(texts: Sequence[str]) -> list[str]:
    """Return the texts with LF for CRLF, without tags and white space at their ends, and without empty ones."""
    cores = (_without_edge(text.replace("\r\n", "\n")) for text in texts)
    return [core for core in cores if core]


def _after_edge(text: str) -> str:
    """Return the text after the tags and the white space that it begins with."""
    text = text.lstrip()
    for _ in range(_MOST_TAGS):
        tag = next(filter(text.startswith, _TAGS), None)
        if tag is None:
            break
        text = text[len(tag) :].lstrip()
    return text


def _without_edge(text: str) -> str:
    text = _after_edge(text).rstrip()
    for _ in range(_MOST_TAGS):
        tag = next(filter(text.endswith, _TAGS), None)
        if tag is None:
            break
        text = text[: -len(tag)].rstrip()
    return text


def _same(pieces: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the trimmed `pieces` say the same as `parts`, wherever either is split or joined.

    What lies at a seam of `parts` may be tags and white space; what lies at a seam of `pieces`, white space.
    """
    said, own = list(reversed(pieces)), list(reversed(parts))
    while said and own:
        piece, part = said.pop(), own.pop()
        size = min(len(piece), len(part))
        if piece[:size] != part[:size]:
            return False
        if rest := _after_edge(piece[size:]):
            said.append(rest)
        if rest := part[size:].lstrip():
            own.append(rest)
    return not said and not own
