"""Which earlier turns a conversation without a parent came from, decided when its first turn is committed.

A client that compacts its context, or hands work to a sub-agent, begins a conversation that shares no tokens with the
one that it came from. What links them is in the session by then: equal messages, the text of a summary, answers that
were kept, the prompt in a tool call, or the name of a thread in headers. A link names its kind and its evidence, and
changes neither tokens nor the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from proxy.types import Interaction, Lineage, Message, Role
from tokengrove.options.session import Purpose
from tokengrove.reasons import Evidence, Reason, Segment

SEARCHED = 256
"""The newest turns of a session, which are looked at."""
BEGUN = frozenset({Reason.NEW_ROOT, Reason.TOOLS_CHANGED, Reason.SYSTEM_CHANGED, Reason.OPTIONS_CHANGED})
"""The reasons of first turns that may have come from another conversation. The others are forks of one."""
_LEAST_SUMMARY, _LEAST_PROMPT = 24, 16
"""The fewest characters of a summary, and of a prompt in a call, that are looked for: shorter ones may be chance."""
_SIDE = (Purpose.TITLE, Purpose.AUX)
# Claude Code cuts the first and unwraps the second before it sends a summary on.
_ANALYSIS = re.compile(r"<analysis>.*?</analysis>", re.DOTALL)
_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)

Find = Callable[[str], Interaction | None]
"""A turn by an id."""


def lineage_of(
    root: Interaction,
    turns: Sequence[Interaction],
    caller: Find,
    known: Find,
    same: Interaction | None = None,
) -> Lineage | None:
    """The turns that `root`, the first turn of a conversation, came from; None if nothing shows any.

    `turns`: the committed turns of its session, newest first. `caller`: the turn that made a call, by the id of the
    call; `known`: a turn by its id. `same`: the last turn of the conversation whose messages the root's begin with,
    under other tools, another system prompt or other options.
    """
    if root.purpose in _SIDE:
        return None
    if same is not None:
        return Lineage((same.id,), _kind(root, Segment.HEAD), Evidence.MESSAGES)
    kept = _kept(root.new_messages, turns, caller)
    if (summary := _summary_in(root.new_messages, turns)) is not None:
        sources = [summary.id, *([kept.id] if kept is not None and kept is not summary else [])]
        kind = Segment.SUMMARY if root.purpose == Purpose.SUMMARY else Segment.COMPACTION
        return Lineage(tuple(sources), kind, Evidence.SUMMARY)
    if (call := _call_with(root, turns, known)) is not None:
        return Lineage((call.id,), Segment.SUBAGENT, Evidence.CALL)
    if kept is not None:
        return Lineage((kept.id,), _kind(root, Segment.COMPACTION), Evidence.ANSWERS)
    return _by_thread(root, turns, known)


def _kind(root: Interaction, other: Segment) -> Segment:
    kinds = {Purpose.SUMMARY: Segment.SUMMARY, Purpose.SUBAGENT: Segment.SUBAGENT}
    return kinds.get(Purpose(root.purpose), other) if root.purpose is not None else other


def _summary_in(messages: Sequence[Message], turns: Sequence[Interaction]) -> Interaction | None:
    """The newest summary whose text one of the messages contains, but for white space."""
    summaries = [turn for turn in turns if turn.purpose == Purpose.SUMMARY]
    if not summaries:
        return None
    texts = [_words(message.content) for message in messages if message.role in (Role.USER, Role.ASSISTANT)]
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


def _kept(messages: Sequence[Message], turns: Sequence[Interaction], caller: Find) -> Interaction | None:
    """The newest turn whose answer is among the messages, by its call ids or by its text."""
    names = [call.id for message in messages for call in message.tool_calls]
    names += [message.tool_call_id for message in messages if message.tool_call_id is not None]
    found = [turn for turn in map(caller, names) if turn is not None]
    said = {message.content for message in messages if message.role is Role.ASSISTANT and not message.tool_calls}
    said = {text for text in said if len(text) >= _LEAST_SUMMARY}
    found += [turn for turn in turns if said and not turn.output.tool_calls and turn.output.content in said]
    return max(found, key=lambda turn: turn.seq, default=None)


def _call_with(root: Interaction, turns: Sequence[Interaction], known: Find) -> Interaction | None:
    """The newest turn with a tool call one of whose arguments is a user's message, or its end.

    Only for a conversation without answers: others quote what came before. An agent may quote a path or a command at
    the end of a message too, so an argument that is not all of it counts only for a conversation with other tools or
    another system prompt, or of a sub-agent by its headers.
    """
    messages = root.new_messages
    if any(message.role is Role.ASSISTANT for message in messages):
        return None
    asked = [_plain(message.content) for message in messages if message.role is Role.USER]
    for turn in turns:
        for call in turn.output.tool_calls:
            prompts = [text for text in map(_plain, _texts(call.arguments)) if len(text) >= _LEAST_PROMPT]
            if any(each == text for text in prompts for each in asked):
                return turn
            if any(each.endswith(text) for text in prompts for each in asked) and _is_other(root, _first(turn, known)):
                return turn
    return None


def _is_other(root: Interaction, first: Interaction) -> bool:
    """Whether a conversation is that of another agent than the one that begins with `first`."""
    if root.purpose == Purpose.SUBAGENT:
        return True
    return bool(root.tools) and (root.tools != first.tools or _system(root) != _system(first))


def _system(root: Interaction) -> list[str]:
    return [message.content for message in root.new_messages if message.role is Role.SYSTEM]


def _first(turn: Interaction, known: Find) -> Interaction:
    """The first turn of a turn's conversation."""
    while turn.parent_id is not None and (parent := known(turn.parent_id)) is not None:
        turn = parent
    return turn


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _texts(arguments: str) -> list[str]:
    """The texts among the arguments of a call."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return []
    return [value for value in given.values() if isinstance(value, str)] if isinstance(given, dict) else []


def _by_thread(root: Interaction, turns: Sequence[Interaction], known: Find) -> Lineage | None:
    """The newest turn of the thread that the client names, or of its parent thread.

    A call without tools is a side call, whatever its thread: no work goes on in it.
    """
    if root.thread is None or not (root.tools or root.purpose in (Purpose.SUMMARY, Purpose.SUBAGENT)):
        return None
    own, parent = root.thread
    for name, kind in ((own, Segment.RESET), (parent, Segment.SUBAGENT)):
        if name is not None and (turn := _newest_of(name, turns, known)) is not None:
            return Lineage((turn.id,), _kind(root, kind) if name is own else kind, Evidence.THREAD)
    return None


def _newest_of(thread: str, turns: Sequence[Interaction], known: Find) -> Interaction | None:
    """The newest turn of the work in a thread."""
    firsts: dict[str, Interaction] = {}
    for turn in turns:
        if turn.purpose in (*_SIDE, Purpose.SUMMARY):
            continue
        passed, first = [], turn
        while first.id not in firsts and first.parent_id is not None and (above := known(first.parent_id)) is not None:
            passed.append(first.id)
            first = above
        first = firsts.get(first.id, first)
        firsts |= dict.fromkeys([*passed, first.id], first)
        if first.thread is not None and first.thread.id == thread and first.tools:
            return turn
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
    counts: dict[str, int] = {}
    kept: set[str] = set()
    before: set[str] = set()
    for root in reversed(roots.values()):
        lineage, name = root.lineage, first[root.id]
        if lineage is not None and lineage.kind is Segment.SUMMARY:
            is_kept = root.id in before
        else:
            is_kept = counts.get(name, 0) < most
            counts[name] = counts.get(name, 0) + 1
        if is_kept:
            kept.add(root.id)
            before.update(() if lineage is None else lineage.sources)
    return {turn.id for turn in turns if begun[turn.id] in kept}


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
