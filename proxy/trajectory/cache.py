"""`InteractionCache`: the forest of complete interactions of one live session; each node stores only what it adds.

Requests find a node only after its commit. `aligned` is proven by comparing token ids. The reason of a node is decided
when the node is placed, so concurrent requests that continue the same parent become siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from proxy.prompt_ids import PromptIds
from proxy.trajectory.matching import ChainState, Identity, RootKeys, extend, identify, route_key
from proxy.trajectory.recent import RecentConversations
from proxy.trajectory.shared_heads import shared_tools
from proxy.types import Ids, Interaction, Message, PlacedImage, Role, TurnRequest
from tokengrove.reasons import Reason, Status

# The number of whole conversations kept per session.
_KEPT = 8

_seq_of = attrgetter("interaction.seq")


@dataclass(slots=True, eq=False)
class Node:
    """An interaction in its tree. `start` and `end` are the hash chain before and after its answer.

    `ids`: its whole prompt and its output. `images`: all images of its prompt, in order. A node has no reference to its
    children: without reference cycles, the memory of a dropped session is freed at once.
    """

    interaction: Interaction
    parent: Node | None
    root: RootKeys
    start: ChainState
    end: ChainState
    ids: PromptIds
    images: tuple[PlacedImage, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output together."""
        return self.interaction.prompt_tokens + len(self.interaction.output_ids)


class Match(NamedTuple):
    """The parent of a request, and how many of the request's messages it covers, leading system messages included.

    `renamed` maps the client's ids of the latest covered tool calls to the ids in the tree, where they differ.
    """

    parent: Node | None
    covered: int
    renamed: Mapping[str, str] = MappingProxyType({})

    def new_messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages after the covered ones. Tool results before the next call get the call ids of the tree."""
        new = tuple(messages[self.covered :])
        if not self.renamed:
            return new
        own = next((at for at, message in enumerate(new) if message.tool_calls), len(new))
        return (*(self._answering(message) for message in new[:own]), *new[own:])

    def _answering(self, message: Message) -> Message:
        own = self.renamed.get(message.tool_call_id or "")
        return message if message.role is not Role.TOOL or own is None else message._replace(tool_call_id=own)


_NO_MATCH = Match(None, 0)


class InteractionCache:
    """The live tree of one session, and its recent conversations. Use it on the event loop only."""

    def __init__(self, interactions: Iterable[Interaction] = ()) -> None:
        self.nodes: dict[str, Node] = {}
        self.recent = RecentConversations()
        self._by_end: dict[int, list[Node]] = {}
        self._by_start: dict[int, list[Node]] = {}
        self._by_body: dict[int, list[Node]] = {}
        self._by_call: dict[str, Node] = {}
        self._children: dict[Node, list[Node]] = {}
        self._conversations: dict[Node, tuple[Message, ...]] = {}
        for interaction in interactions:
            if interaction.status is Status.COMPLETE:
                self.add(self.place_stored(interaction))

    def find_parent(self, request: TurnRequest, identity: Identity) -> Match:
        """Find the deepest node whose conversation, answer included, is a prefix of the request's messages."""
        _, lead, states = identity
        messages, answer = request.messages, Role.ASSISTANT
        for index in range(len(states) - 1, 0, -1):
            if messages[lead + index - 1].role is not answer:
                continue
            if candidates := self._by_end.get(states[index].key):
                covered = lead + index
                parent = self._named(states[index].key, messages[covered - 1], request.previous_id)
                if parent is None:
                    parent = candidates[0] if len(candidates) == 1 else _prefer(candidates, messages[:covered])
                return Match(parent, covered, _renamed(states[index].calls, parent.end.calls))
        return _NO_MATCH

    def caller(self, call_id: str) -> Node | None:
        """The node whose answer made a tool call. Call ids are unique in a session."""
        return self._by_call.get(call_id)

    def called(self, call_id: str) -> Interaction | None:
        """The turn whose answer made a tool call."""
        node = self._by_call.get(call_id)
        return None if node is None else node.interaction

    def turn(self, name: str) -> Interaction | None:
        """A turn by its id."""
        node = self.nodes.get(name)
        return None if node is None else node.interaction

    def newest(self, most: int) -> list[Interaction]:
        """The committed turns, newest first, of the `most` newest."""
        return [node.interaction for node in islice(reversed(self.nodes.values()), most) if node.interaction.seq >= 0]

    def ending(self, key: int) -> Sequence[Node]:
        """The nodes whose conversation, answer included, has the key `key`; the latest is last."""
        return self._by_end.get(key, ())

    def conversation(self, node: Node) -> tuple[Message, ...]:
        """All messages of a node, oldest first, its answer included. The latest are cached, as children extend them."""
        kept, parts = self._conversations, list[tuple[Message, ...]]()
        above: Node | None = node
        while above is not None and above not in kept:
            parts.append((*above.interaction.new_messages, above.interaction.output))
            above = above.parent
        found: tuple[Message, ...] = ()
        if above is not None:
            found = kept[above] = kept.pop(above)
        if parts:
            found = kept[node] = (*found, *chain.from_iterable(reversed(parts)))
        if len(kept) > _KEPT:
            del kept[next(iter(kept))]
        return found

    def find_prefix(self, ids: Ids, images: Iterable[PlacedImage] = (), route: str = "") -> Node | None:
        """Find the deepest node of a route whose prompt and output ids are a prefix of `ids`; the newest of equal ones.

        `images`: all images in `ids`. They must include the images of the node.
        """
        view, placed, own_key = memoryview(ids), frozenset(images), route_key(route)
        heads = [
            node
            for node in self.nodes.values()
            if node.root.route == own_key and (node.parent is None or not node.interaction.aligned)
        ]
        best: tuple[int, int, Node] | None = None
        open_nodes = [(node, 0) for node in heads]
        while open_nodes:
            node, start = open_nodes.pop()
            own = node.interaction
            middle = start + len(own.prompt_suffix)
            end = middle + len(own.output_ids)
            # Comparing views stops at the first difference and copies nothing: a session may have many long roots.
            if own.seq < 0 or view[start:middle] != own.prompt_suffix or view[middle:end] != own.output_ids:
                continue
            if own.images and not placed.issuperset(own.images):  # other images may have the same number of tokens
                continue
            if best is None or (end, own.seq) > best[:2]:
                best = end, own.seq, node
            for child in self._children.get(node, ()):
                if child.interaction.aligned:
                    open_nodes.append((child, end))
        return best[2] if best is not None else None

    def proves(self, parent: Node, prompt: PromptIds) -> bool:
        """Whether a prompt begins with exactly the parent's prompt and output ids: the child is then aligned."""
        return prompt.begins_with(parent.ids)

    def reason_for(self, request: TurnRequest, identity: Identity, match: Match) -> Reason:
        """The reason of an aligned node or a root, derived from the nodes that the tree has now.

        The first that applies: `resampled` (the same conversation was answered before); `rewritten` (an earlier answer
        was replaced); with a parent, `branched` (the parent has other children) or `continued`; without a parent,
        `first` (the tree is empty), the part of the head that changed (tools, system or options), or `new_root`.
        """
        if not self.nodes:
            return Reason.FIRST
        if identity.states[-1].key in self._by_start:
            return Reason.RESAMPLED
        if self._is_rewrite(request.messages, identity, match):
            return Reason.REWRITTEN
        if match.parent is not None:
            return Reason.BRANCHED if self._children.get(match.parent) else Reason.CONTINUED
        return self._changed_head(request.messages, identity) or Reason.NEW_ROOT

    def node_for(
        self,
        interaction: Interaction,
        identity: Identity,
        match: Match,
        prompt: PromptIds,
        images: tuple[PlacedImage, ...] = (),
    ) -> Node:
        """Make the node of a finished interaction, equal to the node of `place_stored`. The tree does not change.

        `images`: all images of the prompt.
        """
        start = identity.states[-1]
        if match.parent is not None:
            stored = extend(match.parent.end, interaction.new_messages)[-1]
            start = stored if stored.key == start.key else start
        end, ids = extend(start, [interaction.output])[-1], prompt.extended(interaction.output_ids)
        return Node(interaction, match.parent, identity.root, start, end, ids, images)

    def place_stored(self, interaction: Interaction) -> Node:
        """Make the node of a stored interaction, whose parent is already in the tree. The tree does not change."""
        parent = self.nodes.get(interaction.parent_id) if interaction.parent_id else None
        if parent is None:
            identity = identify(
                interaction.new_messages, interaction.tools, interaction.template_options, interaction.route
            )
            root, start = identity.root, identity.end
        else:
            root, start = parent.root, extend(parent.end, interaction.new_messages)[-1]
        before, images = PromptIds(), interaction.images
        if parent is not None and interaction.aligned:
            before, images = parent.ids, parent.images + images
        ids = before.extended(interaction.prompt_suffix, interaction.output_ids)
        return Node(interaction, parent, root, start, extend(start, [interaction.output])[-1], ids, images)

    def reserve(self, node: Node) -> None:
        """Reserve a node's place before its commit, so that a sibling that ends in the meantime sees it."""
        if node.interaction.tools:
            node.interaction.tools = shared_tools(node.interaction.tools)
        self.nodes[node.interaction.id] = node
        self._by_start.setdefault(node.start.key, []).append(node)
        if node.parent is not None:
            self._children.setdefault(node.parent, []).append(node)

    def release(self, node: Node) -> None:
        """Undo `reserve` after a failed commit."""
        del self.nodes[node.interaction.id]
        _discard(self._by_start, node.start.key, node)
        if node.parent is not None:
            self._children[node.parent].remove(node)

    def publish(self, node: Node) -> None:
        """Make a reserved node available to requests. Call this after its commit."""
        if candidates := self._by_end.get(node.end.key):
            _keep_newest(candidates, node)
        else:
            self._by_end[node.end.key] = [node]
        self._by_body.setdefault(node.end.body_key, []).append(node)
        for call in node.interaction.output.tool_calls:
            self._by_call[call.id] = node

    def add(self, node: Node) -> None:
        """Reserve the place of a committed node and publish it."""
        self.reserve(node)
        self.publish(node)

    def _named(self, key: int, echoed: Message, previous_id: str | None) -> Node | None:
        """The node with the conversation `key` that a request names, by its id or by the call ids of its answer."""
        names = (previous_id, echoed.origin)
        found = [self.nodes[name] for name in names if name is not None and name in self.nodes]
        if echoed.tool_calls and (caller := self._by_call.get(echoed.tool_calls[0].id)) is not None:
            found.append(caller)
        for node in found:
            named = node.interaction.id in names or _ids_of(node.interaction.output) == _ids_of(echoed)
            if named and node.end.key == key and node.interaction.seq >= 0:
                return node
        return None

    def _is_rewrite(self, messages: Sequence[Message], identity: Identity, match: Match) -> bool:
        """Whether the request replaces an answer of this tree, after the parent, with another assistant message."""
        first = max(match.covered - identity.lead, 0)
        _, lead, states = identity
        answer = Role.ASSISTANT
        for index in range(first, len(states) - 1):
            if messages[lead + index].role is answer and states[index].key in self._by_start:
                return True
        return False

    def same_messages(self, messages: Sequence[Message], identity: Identity) -> Interaction | None:
        """The newest turn whose conversation, answer included, `messages` begin with under another head."""
        node = self._under_other_head(messages, identity)
        return None if node is None else node.interaction

    def _changed_head(self, messages: Sequence[Message], identity: Identity) -> Reason | None:
        """The part of the head that differs from a node with the same messages; None if there is no such node."""
        node = self._under_other_head(messages, identity)
        return None if node is None else _head_difference(node.root, identity.root)

    def _under_other_head(self, messages: Sequence[Message], identity: Identity) -> Node | None:
        for index in range(len(identity.states) - 1, 0, -1):
            if messages[identity.lead + index - 1].role is not Role.ASSISTANT:
                continue
            if candidates := self._by_body.get(identity.states[index].body_key):
                return candidates[-1]
        return None


def _renamed(theirs: Sequence[str], ours: Sequence[str]) -> Mapping[str, str]:
    """Map the client's call ids to the tree's. If a client id repeats, the first counts, as in a message's identity."""
    if theirs == ours:
        return {}
    return dict(reversed([*zip(theirs, ours, strict=True)]))


def _head_difference(old: RootKeys, new: RootKeys) -> Reason:
    if old.tools != new.tools:
        return Reason.TOOLS_CHANGED
    return Reason.SYSTEM_CHANGED if old.system != new.system else Reason.OPTIONS_CHANGED


def _discard(index: dict[int, list[Node]], key: int, node: Node) -> None:
    index[key].remove(node)
    if not index[key]:
        del index[key]


def _keep_newest(candidates: list[Node], node: Node) -> None:
    """Add a node to the candidates with its conversation. Of equal answers to one prompt, only the newest is kept.

    A request continues the others only if it names them, and a prompt may be sampled thousands of times.
    """
    ours = node.interaction.output
    for at, other in enumerate(candidates):
        theirs = other.interaction.output
        same = node.parent is other.parent and ours.content == theirs.content and ours.reasoning == theirs.reasoning
        if same and not ours.tool_calls and not theirs.tool_calls:
            if other.interaction.seq > node.interaction.seq:  # from another replica, read late
                return
            del candidates[at]
            break
    candidates.append(node)


def _prefer(candidates: Sequence[Node], messages: Sequence[Message]) -> Node:
    """Choose among nodes with the same conversation if the request names none of them.

    The chosen node is the one that the request echoes best: the call ids, exact text and reasoning of its latest
    answer, then of the answers before it. Ties go to the newest node.
    """
    # Each path up from a candidate: the candidate, the node reached so far, and the index of its answer's echo.
    paths: list[tuple[Node, Node | None, int]] = [(node, node, len(messages) - 1) for node in candidates]
    while len({node for _, node, _ in paths}) > 1:
        climbing = [(leaf, node, index) for leaf, node, index in paths if node is not None]
        found = [_evidence(node, messages[index]) for _, node, index in climbing]
        best = max(found)
        paths = [
            (leaf, node.parent, index - len(node.interaction.new_messages) - 1)
            for (leaf, node, index), evidence in zip(climbing, found, strict=True)
            if evidence == best
        ]
    return max([leaf for leaf, _, _ in paths], key=_seq_of)


def _evidence(node: Node, echoed: Message) -> tuple[bool, bool, bool]:
    """Whether a request echoes a node's answer: its id or call ids, its text, its reasoning."""
    ours = node.interaction.output
    exact = echoed.origin == node.interaction.id or (bool(ours.tool_calls) and _ids_of(ours) == _ids_of(echoed))
    thought = bool(ours.reasoning) and ours.reasoning == echoed.reasoning
    return exact, ours.content == echoed.content, thought


def _ids_of(answer: Message) -> list[str]:
    return [call.id for call in answer.tool_calls]
