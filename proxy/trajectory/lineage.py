"""Which earlier turns a conversation without a parent came from, decided when its first turn is committed.

A client that compacts its context, or hands work to a sub-agent, begins a conversation that shares no tokens with the
one that it came from. What links them is in the session by then: the text of a summary, call ids that were kept, the
prompt in a tool call, or the name of a thread in headers. A link names its kind and its evidence, and changes neither
tokens nor the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from proxy.types import Interaction, Lineage, Message, Role
from tokengrove.options.session import Purpose
from tokengrove.reasons import Evidence, Segment

_MOST = 256
"""The turns that are looked at, newest first."""
_LEAST_SUMMARY, _LEAST_PROMPT = 24, 16
"""The fewest characters of a summary, and of a prompt in a call, that are looked for: shorter ones may be chance."""
_SIDE = (Purpose.TITLE, Purpose.AUX)
# Claude Code cuts the first and unwraps the second before it sends a summary on.
_ANALYSIS = re.compile(r"<analysis>.*?</analysis>", re.DOTALL)
_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)

Find = Callable[[str], Interaction | None]
"""The turn whose answer made the tool call with an id."""


def lineage_of(root: Interaction, earlier: Iterable[Interaction], caller: Find) -> Lineage | None:
    """The turns that `root`, the first turn of a conversation, came from; None if nothing shows any.

    `earlier`: the committed turns of its session, newest first.
    """
    if root.purpose in _SIDE:
        return None
    turns = list(islice(earlier, _MOST))
    kept = _kept(root.new_messages, caller)
    if (summary := _summary_in(root.new_messages, turns)) is not None:
        sources = [summary.id, *([kept.id] if kept is not None and kept is not summary else [])]
        return Lineage(tuple(sources), _kind(root, Segment.COMPACTION), Evidence.SUMMARY)
    if (call := _call_with(root.new_messages, turns)) is not None:
        return Lineage((call.id,), Segment.SUBAGENT, Evidence.CALL)
    if kept is not None:
        other = Segment.SUBAGENT if root.purpose == Purpose.SUBAGENT else Segment.COMPACTION
        return Lineage((kept.id,), _kind(root, other), Evidence.CALL_IDS)
    return _by_thread(root, turns)


def _kind(root: Interaction, other: Segment) -> Segment:
    return Segment.SUMMARY if root.purpose == Purpose.SUMMARY else other


def _summary_in(messages: Sequence[Message], turns: Sequence[Interaction]) -> Interaction | None:
    """The newest summary whose text one of the messages contains, but for white space."""
    summaries = [turn for turn in turns if turn.purpose == Purpose.SUMMARY]
    if not summaries:
        return None
    texts = [_words(message.content) for message in messages if message.role is not Role.TOOL]
    for turn in summaries:
        forms = [form for form in _forms(turn.output.content) if len(form) >= _LEAST_SUMMARY]
        if any(form in text for text in texts for form in forms):
            return turn
    return None


def _forms(summary: str) -> Iterator[str]:
    yield _words(summary)
    rest = _ANALYSIS.sub("", summary, count=1)
    found = _SUMMARY.search(rest)
    yield _words(rest if found is None else found[1])


def _words(text: str) -> str:
    return " ".join(text.split())


def _kept(messages: Sequence[Message], caller: Find) -> Interaction | None:
    """The newest turn one of whose tool calls is in the messages."""
    names = [call.id for message in messages for call in message.tool_calls]
    names += [message.tool_call_id for message in messages if message.tool_call_id is not None]
    found = [turn for turn in map(caller, names) if turn is not None]
    return max(found, key=lambda turn: turn.seq, default=None)


def _call_with(messages: Sequence[Message], turns: Sequence[Interaction]) -> Interaction | None:
    """The newest turn with a tool call one of whose arguments is whole lines of a user's message.

    Only for a conversation without answers: others quote what came before.
    """
    if any(message.role is Role.ASSISTANT for message in messages):
        return None
    asked = [f"\n{message.content}\n" for message in messages if message.role is Role.USER]
    for turn in turns:
        for call in turn.output.tool_calls:
            prompts = [text.strip("\n") for text in _texts(call.arguments)]
            if any(len(text) >= _LEAST_PROMPT and f"\n{text}\n" in each for text in prompts for each in asked):
                return turn
    return None


def _texts(arguments: str) -> list[str]:
    """The texts among the arguments of a call."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return []
    return [value for value in given.values() if isinstance(value, str)] if isinstance(given, dict) else []


def _by_thread(root: Interaction, turns: Sequence[Interaction]) -> Lineage | None:
    """The newest turn of the thread that the client names, or of its parent thread."""
    if root.thread is None:
        return None
    own, parent = root.thread
    for name, kind in ((own, Segment.RESET), (parent, Segment.SUBAGENT)):
        if name is not None and (turn := _newest_of(name, root, turns)) is not None:
            return Lineage((turn.id,), _kind(root, kind), Evidence.THREAD)
    return None


def _newest_of(thread: str, root: Interaction, turns: Sequence[Interaction]) -> Interaction | None:
    """The newest turn of a thread. A call without tools is not part of the work of an agent with tools."""
    by_id = {turn.id: turn for turn in turns}
    for turn in turns:
        first = turn
        while first.parent_id in by_id:
            first = by_id[first.parent_id]
        named = first.thread is not None and first.thread[0] == thread
        if named and turn.purpose not in (*_SIDE, Purpose.SUMMARY):
            return turn if root.purpose == Purpose.SUMMARY or bool(first.tools) == bool(root.tools) else None
    return None


def lineages_of(turns: Sequence[Interaction]) -> list[dict[str, Any]]:
    """The links of a session as JSON: `interaction_id` and `first`, the first turn of the first conversation.

    `turns`: the complete ones, in order of `seq`. Conversations with the same `first` are one lineage; that of a
    sub-agent begins with its own first turn.
    """
    first = _firsts(turns)
    return [
        {"interaction_id": turn.id, "first": first[turn.id], **turn.lineage.to_json()}
        for turn in turns
        if turn.lineage is not None
    ]


def newest_segments(turns: Sequence[Interaction], most: int) -> set[str]:
    """The ids of the turns of the newest conversations of each lineage, at most `most` each. Those that only ask for a
    summary do not count, and are among them if what follows from them is."""
    first, begun = _firsts(turns), _begun(turns)
    roots = {turn.id: turn for turn in turns if turn.parent_id is None}
    newest: dict[str, list[str]] = {}
    for root in reversed(roots.values()):
        own = newest.setdefault(first[root.id], [])
        counted = sum(not _asks(roots[each]) for each in own)
        if (counted <= most and own) if _asks(root) else counted < most:
            own.append(root.id)
    kept = {name for own in newest.values() for name in own}
    return {turn.id for turn in turns if begun[turn.id] in kept}


def _asks(root: Interaction) -> bool:
    return root.lineage is not None and root.lineage.kind is Segment.SUMMARY


def _begun(turns: Sequence[Interaction]) -> dict[str, str]:
    """The first turn of the conversation of each turn, by id."""
    found: dict[str, str] = {}
    for turn in turns:
        found[turn.id] = turn.id if turn.parent_id is None else found.get(turn.parent_id, turn.id)
    return found


def _firsts(turns: Sequence[Interaction]) -> dict[str, str]:
    """The first turn of the lineage of each turn, by id."""
    found: dict[str, str] = {}
    for turn in turns:
        lineage = turn.lineage
        goes_on = lineage is not None and lineage.kind is not Segment.SUBAGENT
        above = [turn.parent_id] if turn.parent_id else lineage.sources if lineage is not None and goes_on else ()
        found[turn.id] = next((found[name] for name in above if name in found), turn.id)
    return found


def segments_of(turns: Sequence[Interaction]) -> dict[str, Segment]:
    """How the conversation of each turn came about, by the turn's id. `turns`: complete ones, parents first."""
    found: dict[str, Segment] = {}
    for turn in turns:
        own = Segment.NEW if turn.lineage is None else turn.lineage.kind
        found[turn.id] = own if turn.parent_id is None else found.get(turn.parent_id, own)
    return found


def sources_of(turns: Sequence[Interaction]) -> dict[str, tuple[str, ...]]:
    """By the id of the first turn of a conversation that goes on from earlier turns: these, but not of a sub-agent's.

    `turns`: the complete turns of one route. Turns of other routes are no sources.
    """
    known = {turn.id for turn in turns}
    found = {}
    for turn in turns:
        if turn.lineage is not None and turn.lineage.kind is not Segment.SUBAGENT:
            found[turn.id] = tuple(name for name in turn.lineage.sources if name in known)
    return found
