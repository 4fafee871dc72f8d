"""The purpose of an interaction, a tag that exports filter on. It never changes tokens.

A purpose that the client states, by a header or a known prompt, is stored. Other purposes are derived from the whole
tree on demand, because the first request of a session may turn out to be a title call next to the agent's own work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

from proxy.types import Interaction, Message, Role
from tokengrove.options.session import Purpose
from tokengrove.reasons import Status

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_NUMBER = r"\d{1,2}(?:st|nd|rd|th)?\b"
# Dates and times in a system prompt: whole dates, times of day, weekdays, years, Unix seconds.
_DATES = re.compile(
    r"\d{4}年\d{1,2}月\d{1,2}日"
    r"|\b(?:"
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}T?"
    r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{2}(?:\d{2})?\b"
    rf"|{_MONTH}\s+{_NUMBER}"
    rf"|{_NUMBER}\s+(?:of\s+)?{_MONTH}"
    rf"|{_MONTH}(?=\s+\d{{4}}\b)"
    r"|(?:mon|tue(?:s)?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b"
    r"|(?:19|20)\d{2}\b"
    r"|(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:T\d{4}(?:\d{2})?Z?)?\b"
    r"|\d{10}(?:\d{3})?(?:\.\d+)?\b"
    r")"
    r"|(?<!\d)\d{1,2}(?::\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s*[ap](?:\.m\.|m\b))?|\s*[ap](?:\.m\.|m\b))",
    re.IGNORECASE,
)
# The dates of equal prompts differ in length by a few characters each; a greater difference is not due to dates.
_DATES_DIFFER = 200


# Phrases of known clients. A title call has one in its system prompt. A compaction has one at the beginning of a line
# in the user message, or anywhere in the system prompt.
_TITLE_PROMPTS = (
    "you are a title generator",  # opencode
    "generate a concise, sentence-case title",  # Claude Code
    "summarize this coding conversation in under 50 characters",  # Claude Code, older
    "analyze if this message indicates a new conversation topic",  # Claude Code, older
)
_SUMMARY_PROMPTS = (
    "your task is to create a detailed summary of ",  # Claude Code
    "you are performing a context checkpoint compaction",  # Codex
    "provide a detailed prompt for continuing our conversation above",  # opencode
    "you are a helpful ai assistant tasked with summarizing conversations",  # Claude Code, as system prompt
    "first, reason in your <analysis> block. then, produce the <state_snapshot> xml",  # qwen-code
    "do not call tools; tool execution is disabled for this request. first, reason in your <analysis>",  # qwen-code
    "create a new anchored summary from the conversation history",  # opencode
    "you are a context summarization a",  # opencode (agent) and pi (assistant), as system prompt
    "*briefly* summarize this partial conversation",  # aider, as system prompt
)

# Searched for, because splitting a message of millions of lines would block the event loop.
_SUMMARY_LINE = re.compile("\n(?:" + "|".join(map(re.escape, _SUMMARY_PROMPTS)) + ")")

# A system prompt may hold 30,000 characters and comes with every turn; searching it for all phrases takes 0.5 ms.
_KEPT_SYSTEMS = 64
_LONGEST_KEPT = 100_000  # characters; longer system prompts are searched each time, to limit the memory of the cache


def purpose_of_prompt(messages: Sequence[Message]) -> Purpose | None:
    """The purpose that a prompt states by a phrase of a known client; None if it has no such phrase.

    Of the user messages, only the last counts, and only if nothing but notes of the system follow it, as in Claude
    Code: a tool result may quote any phrase.
    """
    systems, last, wanted = list[str](), None, Role.SYSTEM
    for message in messages:
        if message.role is wanted:
            systems.append(message.content)
        else:
            last = message
    if systems:
        system = "\n".join(systems)
        look = _purpose_of_system if len(system) <= _LONGEST_KEPT else _purpose_of_system.__wrapped__
        if (stated := look(system)) is not None:
            return stated
    if last is not None and last.role is Role.USER:
        text = last.content.lower()
        if text.startswith(_SUMMARY_PROMPTS) or _SUMMARY_LINE.search(text) is not None:
            return Purpose.SUMMARY
    return None


@lru_cache(maxsize=_KEPT_SYSTEMS)
def _purpose_of_system(system: str) -> Purpose | None:
    system = system.lower()
    if any(phrase in system for phrase in _TITLE_PROMPTS):
        return Purpose.TITLE
    return Purpose.SUMMARY if any(phrase in system for phrase in _SUMMARY_PROMPTS) else None


def derive_purposes(interactions: Sequence[Interaction]) -> dict[str, str]:
    """The purpose of every complete interaction of a session by id. A stored purpose is kept.

    Roots are compared with roots of their own route: an opponent is no sub-agent of the policy.
    """
    complete = [interaction for interaction in interactions if interaction.status is Status.COMPLETE]
    roots = [interaction for interaction in complete if interaction.parent_id is None]
    purposes: dict[str, Purpose] = {}
    for route in dict.fromkeys([root.route for root in roots]):
        purposes |= _root_purposes([root for root in roots if root.purpose is None and root.route == route])
    out: dict[str, str] = {}
    for interaction in complete:  # parents come before their children
        inherited = (
            _inherited(out.get(interaction.parent_id)) if interaction.parent_id else purposes.get(interaction.id)
        )
        out[interaction.id] = interaction.purpose or inherited or Purpose.MAIN
    return out


def _inherited(purpose: str | None) -> str | None:
    """The purpose that a child inherits. A summary is one call: its children are the agent's own work again."""
    return None if purpose == Purpose.SUMMARY else purpose


def _root_purposes(roots: Sequence[Interaction]) -> dict[str, Purpose]:
    """The purposes of roots without a stored purpose, relative to the first root that has tools.

    A root that begins with the same message is main. Any other root without tools is aux. With tools, it is main if its
    system messages are equal but for dates and times, as after a compaction, else a sub-agent's. If no root has tools,
    all are main.
    """
    first = next((root for root in roots if root.tools), None)
    if first is None:
        return {root.id: Purpose.MAIN for root in roots}
    return {root.id: _beside(first, root) for root in roots}


def _beside(first: Interaction, root: Interaction) -> Purpose:
    if _beginning(root) == _beginning(first):
        return Purpose.MAIN
    if not root.tools:
        return Purpose.AUX
    return Purpose.MAIN if _equal_but_for_dates(_system(root), _system(first)) else Purpose.SUBAGENT


def _beginning(root: Interaction) -> Message | None:
    """The first message that is not a system message."""
    return next((message for message in root.new_messages if message.role is not Role.SYSTEM), None)


def _system(root: Interaction) -> list[str]:
    """The texts of the leading system messages."""
    return [message.content for message in takewhile(lambda message: message.role is Role.SYSTEM, root.new_messages)]


def _equal_but_for_dates(one: Sequence[str], other: Sequence[str]) -> bool:
    if len(one) != len(other) or abs(sum(map(len, one)) - sum(map(len, other))) > _DATES_DIFFER:
        return False
    return one == other or list(map(_undated, one)) == list(map(_undated, other))


def _undated(text: str) -> str:
    return (_search_dates if len(text) <= _LONGEST_KEPT else _search_dates.__wrapped__)(text)


@lru_cache(maxsize=_KEPT_SYSTEMS)
def _search_dates(text: str) -> str:
    return " ".join(_DATES.sub("", text).split())
