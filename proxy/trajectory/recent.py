"""The latest conversations of a session. A conversation is hashed only from where it differs from an earlier one.

An agent sends its whole history with every turn. A kept identity depends only on the messages kept with it, so it never
goes stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from proxy.trajectory.matching import Identity, count_leading_system, extend, root_keys
from proxy.trajectory.shared_heads import shared_lead
from proxy.types import Message, Role, Tool

# An agent and its sub-agents may take turns in one session.
_KEPT = 4


class Identified(NamedTuple):
    """A conversation and its identity."""

    messages: tuple[Message, ...]
    identity: Identity


class RecentConversations:
    """The latest conversations of one session that do not extend each other. Use it on the event loop only."""

    def __init__(self) -> None:
        self.kept: list[Identified] = []

    def identify(
        self,
        messages: tuple[Message, ...],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        route: str = "",
        *,
        keep: bool = True,
    ) -> Identified:
        """Identify a conversation, as `matching.identify` does. It shares its first messages with an earlier one.

        Without `keep`, the conversation is not kept.
        """
        lead = 0 if messages and messages[0].role is not Role.SYSTEM else count_leading_system(messages)
        root = root_keys(messages[:lead], tools, options, route)
        known: Identified | None = None
        shared, states = lead, [root.start]
        for other in self.kept:
            if other.identity.root == root and (common := _common(other.messages, messages)) > shared:
                known, shared, states = other, common, [*other.identity.states[: common - lead + 1]]
        if known is not None:
            messages = known.messages[:shared] + messages[shared:]
        elif lead:
            messages = shared_lead(messages[:lead]) + messages[lead:]
        states += extend(states.pop(), messages[shared:])
        found = Identified(messages, Identity(root, lead, tuple(states)))
        if keep:
            self._keep(found, known if known is not None and shared == len(known.messages) else None)
        return found

    def forget(self, messages: tuple[Message, ...]) -> None:
        """Forget the conversation of these messages, as returned by `identify`: it did not become a turn."""
        self.kept = [other for other in self.kept if other.messages is not messages]

    def _keep(self, found: Identified, extended: Identified | None) -> None:
        """Keep a conversation. It replaces the one that it extends, or the oldest if there are too many."""
        if not self.kept:
            self.kept = [found]
            return
        others = [other for other in self.kept if other is not extended]
        self.kept = [*others[-_KEPT + 1 :], found]


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """The number of equal messages at the beginning of two conversations. Messages are compared without Python code."""
    same, size = 0, min(len(one), len(other))
    if one[:size] == other[:size]:  # the usual case, in one comparison
        return size
    while size - same > 1:  # the first `same` messages are equal, the first `size` are not
        middle = (same + size) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            size = middle
    return same
