"""Explain why a turn forked: the nearest earlier turn, and the first difference from it.

Messages are compared as the tree compares them (`trajectory.matching`), so what the tree ignores is no difference here.
A turn is compared only with turns that were committed before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from proxy.trajectory.conversation import conversation, conversation_above, root
from proxy.trajectory.matching import ChainState, canonical_arguments, canonical_json, extend, message_key
from proxy.trajectory.tree import Branch, Linked, build_tree, token_ids
from proxy.types import Api, Interaction, Message, Role, Tool
from tokengrove.reasons import Differs, Reason

_GOES_ON = (Reason.FIRST, Reason.CONTINUED)
_UNALIGNED = (Reason.TEMPLATE, Reason.DRIFT)
_TOKENS_SHOWN = 8
_UNKNOWN: Mapping[str, str] = MappingProxyType({})
_START = ChainState(key=0, body_key=0)


@dataclass(frozen=True, slots=True)
class MessageDifference:
    """The first message that differs. `index` counts all messages of the conversation, also leading system messages.

    `count`: the number of removed or inserted messages. `sent`: this turn's message. `recorded`: the nearest turn's
    message. Either is None if its side has ended. `owner`: the turn that added `recorded`, or answered with it.
    """

    index: int
    why: Differs
    sent: Message | None
    recorded: Message | None
    owner: Interaction | None
    count: int = 1


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token that differs. `sent` and `recorded`: at most eight ids from there on."""

    index: int
    sent: tuple[int, ...]
    recorded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a turn relates to earlier turns. All fields but `continued` are None for a turn that did not fork.

    `continued`: its parent. `tools`: the names of the `added`, `removed` and `changed` tools. `template_options`: the
    options `sent` and `recorded`.
    """

    continued: Interaction | None = None
    nearest: Interaction | None = None
    why: Differs | None = None
    message: MessageDifference | None = None
    tools: Mapping[str, Sequence[str]] | None = None
    template_options: Mapping[str, Any] | None = None
    token: TokenDifference | None = None


class Comparisons:
    """Compares the turns of one session. `interactions`: all of them, in order of `seq`.

    Messages are hashed once; one comparison takes time linear in their number. `pixels`: digests of the decoded pixels
    of images, by the digests of the images, as far as they are known.
    """

    def __init__(self, interactions: Sequence[Interaction], pixels: Mapping[str, str] = _UNKNOWN) -> None:
        self._nodes, self._pixels = build_tree(interactions), pixels
        self._marks: dict[str, _Marks] = {}
        for name, node in self._nodes.items():
            added = (*node.interaction.new_messages, node.interaction.output)
            self._marks[name] = _mark(self._state(node.parent), added)

    def of(self, turn: Interaction) -> Comparison:
        """Compare a turn with the turns of its route that were committed before it."""
        parent = self._nodes.get(turn.parent_id) if turn.parent_id else None
        own = Branch(turn, parent, 0)
        above = parent.interaction if parent is not None else None
        if turn.reason in _GOES_ON:
            return Comparison(continued=above)
        if parent is not None and turn.reason in _UNALIGNED:
            return Comparison(above, above, Differs.TOKENS, token=_first_token(own, parent))
        own_route = [node for node in self._nodes.values() if node.interaction.route == turn.route]
        earlier = [node for node in own_route if node.interaction.seq < turn.seq]
        if turn.api in (Api.GENERATE, Api.COMPLETIONS):
            return _compare_tokens(own, earlier)
        return _compare_messages(own, self._nearest(own, earlier), self._pixels)

    def _state(self, node: Linked | None) -> ChainState:
        return _START if node is None else self._marks[node.interaction.id].state

    def _nearest(self, own: Branch, earlier: Sequence[Branch]) -> tuple[Linked, int] | None:
        """The turn with the most messages in common, and the number of equal messages at the beginning.

        Ties go to the longest common beginning, then to the shortest conversation, then to the newest turn. The
        ancestors of a turn do not count: it continues them.
        """
        path, above = [_mark(self._state(own.parent), own.interaction.new_messages)], own.parent
        while above is not None:
            path.append(self._marks[above.interaction.id])
            above = above.parent
        bodies = [body for marks in reversed(path) for body in marks.bodies]
        keys = {key for marks in path for key in marks.keys}
        seen: dict[str, _Seen] = {}
        best: tuple[tuple[int, int, int, int], Linked] | None = None
        for node in earlier:
            before = seen[node.parent.interaction.id] if node.parent is not None else _Seen(below=own.parent is None)
            marks = self._marks[node.interaction.id]
            shared = before.shared
            if shared == before.length:
                shared += _agreeing(marks.bodies, bodies[shared:])
            found = _Seen(
                before.length + len(marks.keys),
                shared,
                before.common + sum(key in keys for key in marks.keys),
                before.below or node.parent is own.parent,
            )
            seen[node.interaction.id] = found
            rank = (found.common, shared, -found.length, node.interaction.seq)
            if found.below and (best is None or rank > best[0]):
                best = rank, node
        return None if best is None else (best[1], seen[best[1].interaction.id].shared)


def turn_numbers(interactions: Sequence[Interaction]) -> dict[str, int]:
    """The numbers of the complete turns of a session by id, from 0; `interactions` are in order of `seq`."""
    return {name: number for number, name in enumerate(build_tree(interactions))}


def _compare_tokens(own: Branch, earlier: Sequence[Branch]) -> Comparison:
    """Compare prompts that came as token ids: they have no messages of their own."""
    above = own.parent.interaction if own.parent is not None else None
    others = [node for node in earlier if node.parent is own.parent]
    nearest, differs = max(
        ((node, _first_token(own, node)) for node in others),
        key=lambda found: (found[1].index, found[0].interaction.seq),
        default=(None, None),
    )
    if nearest is None:
        return Comparison(above)
    return Comparison(above, nearest.interaction, Differs.TOKENS, token=differs)


def _first_token(own: Branch, other: Branch) -> TokenDifference:
    """The first token of a prompt that differs from another turn's prompt and output, or the end of the shorter."""
    sent = np.frombuffer(token_ids(own), np.int32)[: own.interaction.prompt_tokens]
    recorded = np.frombuffer(token_ids(other), np.int32)
    size = min(len(sent), len(recorded))
    unequal = np.flatnonzero(sent[:size] != recorded[:size])
    at = int(unequal[0]) if len(unequal) else size
    end = at + _TOKENS_SHOWN
    return TokenDifference(at, tuple(sent[at:end].tolist()), tuple(recorded[at:end].tolist()))


def _compare_messages(own: Branch, found: tuple[Linked, int] | None, pixels: Mapping[str, str]) -> Comparison:
    """`found`: the nearest turn, and the number of equal messages at the beginning."""
    above = own.parent.interaction if own.parent is not None else None
    if found is None:
        return Comparison(above)
    sent = (*conversation_above(own), *own.interaction.new_messages)
    nearest, shared = found
    tools, options = _tools(root(own), root(nearest)), _options(root(own), root(nearest))
    recorded = conversation(nearest)
    message = _first_message(nearest, recorded, sent, shared, pixels)
    if message is not None:
        why = message.why
    elif tools is not None:
        why = Differs.TOOLS
    elif options is not None:
        why = Differs.TEMPLATE_OPTIONS
    else:
        why = Differs.SAME if shared < len(recorded) else Differs.LATE
    return Comparison(above, nearest.interaction, why, message, tools, options)


class _Marks(NamedTuple):
    """Hashes of the messages that a turn adds. `state`: the chain after them. `bodies`: the chain after each message,
    without the head of the prompt. `keys`: the key of each message by itself."""

    state: ChainState
    bodies: Sequence[int]
    keys: Sequence[int]


def _mark(before: ChainState, messages: Sequence[Message]) -> _Marks:
    chain = extend(before, messages)
    return _Marks(chain[-1], [state.body_key for state in chain[1:]], _keys(messages))


def _keys(messages: Sequence[Message]) -> list[int]:
    return [message_key(message, ()) for message in messages]


class _Seen(NamedTuple):
    """A conversation, its answer included, compared with the turn's own. `below`: both branch off at the same parent.

    `length`: the number of its messages. `shared`: the number of equal messages at the beginning. `common`: the number
    of its messages that the turn's conversation contains anywhere.
    """

    length: int = 0
    shared: int = 0
    common: int = 0
    below: bool = True


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal entries at the beginning of two sequences."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return min(len(one), len(other))


def _first_message(
    nearest: Linked, recorded: Sequence[Message], sent: Sequence[Message], shared: int, pixels: Mapping[str, str]
) -> MessageDifference | None:
    """The first message that differs; None if `sent` has all `recorded` messages, or all but the answer."""
    if shared == len(recorded) or (shared == len(sent) == len(recorded) - 1):
        return None
    theirs, owner = recorded[shared], _owner(nearest, shared)
    if shared == len(sent):
        return MessageDifference(shared, Differs.ENDED, None, theirs, owner)
    mine = sent[shared]
    why, count = _gap(sent[shared:], recorded[shared:]) or (_why(mine, theirs, pixels), 1)
    return MessageDifference(shared, why, mine, theirs, owner, count)


def _gap(sent: Sequence[Message], recorded: Sequence[Message]) -> tuple[Differs, int] | None:
    """Whether messages were removed or inserted here, and how many; None if a message was replaced."""
    mine, theirs = _keys(sent), _keys(recorded)
    if mine[0] in theirs[1:]:
        return Differs.REMOVED, theirs.index(mine[0], 1)
    if theirs[0] in mine[1:]:
        return Differs.INSERTED, mine.index(theirs[0], 1)
    return None


def _why(mine: Message, theirs: Message, pixels: Mapping[str, str]) -> Differs:
    if mine.role is not theirs.role:
        return Differs.ROLE
    if _calls(mine) != _calls(theirs):
        return Differs.TOOL_CALLS
    if mine.images != theirs.images:
        same = mine.content == theirs.content and _pictures(mine, pixels) == _pictures(theirs, pixels)
        return Differs.ENCODED_ANEW if same else Differs.IMAGES
    return Differs.TOOL_CALL_ID if mine.role is Role.TOOL and mine.content == theirs.content else Differs.CONTENT


def _pictures(message: Message, pixels: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """The pixel digest, place and detail of each image of a message."""
    return [(pixels.get(image.digest, image.digest), image.at, image.detail) for image in message.images]


def _calls(message: Message) -> list[tuple[str, bytes]]:
    return [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]


def _owner(node: Linked, index: int) -> Interaction:
    """The turn on the path to `node` that added the message `index` of its conversation, or answered with it."""
    start = len(conversation_above(node))
    while node.parent is not None and index < start:
        node = node.parent
        start -= len(node.interaction.new_messages) + 1
    return node.interaction


def _tools(own: Linked, other: Linked) -> Mapping[str, Sequence[str]] | None:
    """The names of the tools that differ between two roots; None if none does."""
    mine, theirs = ({tool.name: _schema(tool) for tool in node.interaction.tools} for node in (own, other))
    if list(mine.items()) == list(theirs.items()):
        return None
    return {
        "added": [name for name in mine if name not in theirs],
        "removed": [name for name in theirs if name not in mine],
        "changed": [name for name in mine if theirs.get(name, mine[name]) != mine[name]],
    }


def _schema(tool: Tool) -> tuple[str, bytes]:
    return tool.description, canonical_json(tool.parameters)


def _options(own: Linked, other: Linked) -> Mapping[str, Any] | None:
    """The template options of two roots, if they differ."""
    mine, theirs = own.interaction.template_options, other.interaction.template_options
    return None if canonical_json(mine) == canonical_json(theirs) else {"sent": mine, "recorded": theirs}
