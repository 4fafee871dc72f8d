"""Echoes: answers of this server that a client sends back with changes that do not matter.

Messages are an echo if all their call ids belong to one answer at this place of the conversation, or to several
consecutive answers, their calls are equal, and their text is empty or equal. Tags around reasoning, CRLF for LF, outer
white space, and where a text is split or joined do not count; every other character does. Without calls, messages are
an echo only if they differ from an answer in one way: its reasoning, in tags, stands apart from its text. The answer
then replaces its echo, so that the turn continues the sampled tokens. Any other text, argument, call or result is the
client's own and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from proxy.trajectory.arguments import Fit, compare_arguments
from proxy.trajectory.cache import InteractionCache, Node
from proxy.trajectory.matching import ChainState, Identity, extend, visible
from proxy.types import Message, Role, Tool, ToolCall
from tokengrove.reasons import Echo

_ASSISTANT, _TOOL = Role.ASSISTANT, Role.TOOL
# The tags that separate reasoning from text in messages without calls, where no call ids identify the answer.
_OPENED, _CLOSED = ("<think>", "<thinking>"), ("</think>", "</thinking>")


class Restored(NamedTuple):
    """A conversation in which recorded answers replace their echoes. `echo`: what the client changed."""

    messages: tuple[Message, ...]
    identity: Identity
    echo: tuple[Echo, ...]


class _Echoed(NamedTuple):
    """Messages up to index `end` that echo answers: the node of each answer, and its tool results."""

    answers: Sequence[tuple[Node, Sequence[Message]]]
    end: int
    kinds: set[Echo]


def restore(
    cache: InteractionCache,
    messages: Sequence[Message],
    identity: Identity,
    tools: Sequence[Tool],
    exact: int = 0,
) -> Restored | None:
    """Replace echoes with the recorded answers. None if there is no changed echo.

    `identity`: the identity of `messages`. `exact`: the number of leading messages that are known to be a conversation
    of the tree. An answer counts as echoed only if its whole conversation comes before it.
    """
    root, lead, given = identity
    at = max(exact, lead)
    while at > lead and messages[at - 1].role is _ASSISTANT:  # they may be the beginning of a split answer
        at -= 1
    callers = _callers(cache, messages, at)
    if not any(callers) and not any(map(_ends_in_reasoning, messages[at:])):
        return None
    schemas = {tool.name: tool.parameters for tool in tools}
    out, states, kinds, changed = list(messages[:at]), list(given[: at - lead + 1]), set[Echo](), False
    while at < len(messages):
        node, found = callers[at], None
        if node is None:
            found = _reasoned_at(cache, messages, at, states[-1])
        elif node.start.key == states[-1].key:
            found = _echo_at(node, messages, at, schemas) or _joined_at(cache, messages, at, schemas)
        if found is not None:
            for answered, results in found.answers:
                out += (answered.interaction.output, *results)
                states += extend(answered.end, results)
            at, kinds, changed = found.end, kinds | found.kinds, True
            continue
        out.append(messages[at])
        states.append(extend(states[-1], messages[at : at + 1])[1] if changed else given[at - lead + 1])
        at += 1
    if not changed:
        return None
    return Restored(tuple(out), Identity(root, lead, tuple(states)), tuple(kind for kind in Echo if kind in kinds))


def _callers(cache: InteractionCache, messages: Sequence[Message], start: int) -> list[Node | None]:
    """For each assistant message from `start` on, the node that made the first call in it or in the assistant messages
    directly after it."""
    callers: list[Node | None] = [None] * (len(messages) + 1)
    for at in range(len(messages) - 1, start - 1, -1):
        message = messages[at]
        if message.role is _ASSISTANT:
            callers[at] = cache.caller(message.tool_calls[0].id) if message.tool_calls else callers[at + 1]
    return callers[:-1]


def _ends_in_reasoning(message: Message) -> bool:
    """Whether a message without calls ends with a tag that closes reasoning."""
    return message.role is _ASSISTANT and not message.tool_calls and message.content.rstrip().endswith(_CLOSED)


def _reasoned_at(cache: InteractionCache, messages: Sequence[Message], at: int, state: ChainState) -> _Echoed | None:
    """Return the latest answer without calls that the message at index `at` echoes with its reasoning in tags.

    The reasoning follows the text, or it is a whole message and the text is the next message.
    """
    if not _ends_in_reasoning(messages[at]):
        return None
    if visible(messages[at].content):
        before, _, reasoning = _split_last(messages[at].content)
        text, end, kind = messages[at]._replace(content=before), at + 1, Echo.REASONING_AS_TEXT
    elif at + 1 < len(messages) and messages[at + 1].role is _ASSISTANT and not messages[at + 1].tool_calls:
        reasoning, text, end, kind = messages[at].content, messages[at + 1], at + 2, Echo.SPLIT
    else:
        return None
    thought = trimmed([reasoning])
    for node in reversed(cache.ending(extend(state, [text])[1].key)):
        if thought and thought == trimmed([node.interaction.output.reasoning or ""]):
            return _Echoed([(node, ())], end, {kind})
    return None


def _split_last(text: str) -> tuple[str, str, str]:
    """Split `text` at the last tag that opens reasoning. Without a tag, all of it is the last part."""
    return max((text.rpartition(tag) for tag in _OPENED), key=lambda parts: len(parts[0]))


def _echo_at(
    node: Node, messages: Sequence[Message], at: int, schemas: Mapping[str, Mapping[str, object]]
) -> _Echoed | None:
    """Return the changed echo of the answer of `node` that begins at index `at`, or None."""
    ours = node.interaction.output
    pieces, results, end = _gather(messages, at, len(ours.tool_calls))
    if {result.tool_call_id for result in results} - {call.id for piece in pieces for call in piece.tool_calls}:
        return None
    kinds = compare([ours], pieces, schemas)
    if kinds is None or (not kinds and len(pieces) == 1 and extend(node.start, pieces)[1].key == node.end.key):
        return None
    return _Echoed([(node, results)], end, kinds | {Echo.SPLIT} if len(pieces) > 1 else kinds)


def _joined_at(
    cache: InteractionCache, messages: Sequence[Message], at: int, schemas: Mapping[str, Mapping[str, object]]
) -> _Echoed | None:
    """Return the answers that the assistant messages from index `at` on join, each with its tool results.

    None unless they are several consecutive answers.
    """
    middle = _skip(messages, at, _ASSISTANT)
    end = _skip(messages, middle, _TOOL)
    nodes: list[Node] = []
    for call in _calls(messages[at:middle]):
        node = cache.caller(call.id)
        if node is None:
            return None
        if not nodes or node is not nodes[-1]:
            nodes.append(node)
    if len(nodes) < 2:
        return None
    answers = [(node, _results_of(node, messages[middle:end])) for node in nodes]
    ends = [extend(node.end, results)[-1].key for node, results in answers]
    if ends[:-1] != [node.start.key for node in nodes[1:]]:
        return None
    kinds = compare([node.interaction.output for node in nodes], messages[at:middle], schemas)
    if kinds is None or sum(len(results) for _, results in answers) != end - middle:
        return None
    return _Echoed(answers, end, kinds | {Echo.JOINED})


def _skip(messages: Sequence[Message], at: int, role: Role) -> int:
    """Return the index after the messages of this role from index `at` on."""
    while at < len(messages) and messages[at].role is role:
        at += 1
    return at


def _results_of(node: Node, results: Sequence[Message]) -> list[Message]:
    own = {call.id for call in node.interaction.output.tool_calls}
    return [result for result in results if result.tool_call_id in own]


def compare(
    ours: Sequence[Message], pieces: Sequence[Message], schemas: Mapping[str, Mapping[str, object]]
) -> set[Echo] | None:
    """Return how calls and text of `pieces` differ from the answers `ours`, or None if they are the client's own."""
    fit = _compare_calls(_calls(ours), _calls(pieces), schemas)
    kinds = compare_text(ours, [piece.content for piece in pieces])
    if fit is Fit.DIFFERENT or kinds is None:
        return None
    return kinds | {Echo.NULLS_ADDED} if fit is Fit.NULLS_ADDED else kinds


def _calls(messages: Sequence[Message]) -> list[ToolCall]:
    return [call for message in messages for call in message.tool_calls]


def _gather(messages: Sequence[Message], at: int, number: int) -> tuple[list[Message], list[Message], int]:
    """Return the assistant messages from index `at` on that may echo an answer with `number` calls.

    Also returns the tool results between them, and the index after them all.
    """
    pieces: list[Message] = []
    results: list[Message] = []
    called = 0
    while at < len(messages):
        message = messages[at]
        if message.role is _ASSISTANT and not (called >= number and message.tool_calls):
            pieces.append(message)
            called += len(message.tool_calls)
        elif message.role is _TOOL and 0 < called < number:
            results.append(message)
        else:
            break
        at += 1
    return pieces, results, at


def _compare_calls(
    ours: Sequence[ToolCall], theirs: Sequence[ToolCall], schemas: Mapping[str, Mapping[str, object]]
) -> Fit:
    """Compare ids, names and arguments of calls, in order."""
    if [call[:2] for call in ours] != [call[:2] for call in theirs]:
        return Fit.DIFFERENT
    fits = {
        compare_arguments(own.arguments, other.arguments, schemas.get(own.name, {}))
        for own, other in zip(ours, theirs, strict=True)
    }
    return max(fits, default=Fit.EQUAL)


# Tags that clients write around reasoning, and the maximum number removed from one end of a text.
_NAMES = ("think", "thinking", "thought", "reasoning", "mm:think", "seed:think")
_TAGS = (
    *(f"<{slash}{name}>" for name in _NAMES for slash in ("", "/")),
    *("[THINK]", "[/THINK]", "\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
_MOST_TAGS = 4


def compare_text(ours: Sequence[Message], pieces: Sequence[str]) -> set[Echo] | None:
    """Return how the text of an echo differs from the answers `ours`, or None if it is the client's own."""
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
        # A client that sends each call in a message of its own may repeat the text in each.
        if _same(said, parts * calls):
            return kinds | {Echo.SPLIT}
    return None


def trimmed(texts: Sequence[str]) -> list[str]:
    """Return the texts with LF for CRLF and without tags and white space at their ends. Empty texts are left out."""
    cores = (_without_edge(text.replace("\r\n", "\n")) for text in texts)
    return [core for core in cores if core]


def _after_edge(text: str) -> str:
    """Return the text without the tags and white space at its beginning."""
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
    """Return whether the trimmed `pieces` have the same text as `parts`, wherever either is split or joined.

    Tags and white space may be at a seam of `parts`, only white space at a seam of `pieces`.
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
