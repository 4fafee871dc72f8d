"""The JSON of one stored turn: a summary, and the parts that `include` names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from proxy.api.session_json import interactions_json, session_json
from proxy.trajectory.compared import Comparison, Comparisons, MessageDifference, TokenDifference, turn_numbers
from proxy.trajectory.conversation import conversation_above, message_dict, root, tool_dict, with_tokens
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.routes import trained_turns
from proxy.trajectory.sample_maker import Decode
from proxy.trajectory.scored_session import scored_session
from proxy.trajectory.tree import Branch, build_tree, images_of, token_ids
from proxy.types import Interaction, Message, SessionRecord
from tokengrove.errors import InvalidRequest, NotFound, brief
from tokengrove.options.export import Unrewarded
from tokengrove.reasons import Explained
from tokengrove.texts import message_text

_SHOWN_BEFORE, _SHOWN = 40, 200
_ANSWER_SHOWN = 160


class Part(Explained):
    """The values of `include`."""

    MESSAGES = (
        "messages",
        "the whole conversation: `messages`, of which the parent had the first `inherited`, the answer as `output`, "
        "`tools`, `template_options` and `sampling`",
    )
    ADDED = (
        "added",
        "`added`: the `messages` that this turn brought, its `output` and `sampling`; `tools` and `template_options` "
        "of a turn without parent, which those below it share",
    )
    IDS = "ids", "`prompt_ids` and `output_ids`"
    LOGPROBS = (
        "logprobs",
        "`logprobs`, one for each output id (null if the answer came without), and `unmasked_logprobs`",
    )
    REQUEST = (
        "request",
        "`request`: `method`, `path` and `body` that ask for the same prompt again, and what they lack",
    )
    REPLY = "reply", "`reply` as the client got it, without `top_logprobs`; a stream as a whole; null for a failed turn"
    TIMES = "times", "`created_at`, `first_token_at` and `completed_at`, in Unix seconds"
    COMPARED = "compared", "the turn that this one `continued`; if it forked, the `nearest` turn and what differs first"
    ANSWER = "answer", "`answer`: the first 160 characters of the answer's `text`, and the names of its tool `calls`"
    RUNNING = "running", "`running`: the calls that have begun and not ended, each with what is known of it"
    SCORE = "score", "`score` of the session, and `left_out`: why an export with `unrewarded: skip` leaves it out"
    TOKENS = (
        "tokens",
        "`tokens`: every token of prompt and output with its text, logprob and weight version, and what becomes of it "
        "in an export",
    )
    REPLAY = "replay", "`replay`: the side columns that the turn recorded, each with its number of rows"
    COLUMNS = (
        "columns",
        "`columns`: the rows of side columns of at most 256 tokens: kept sets, routed experts and alternatives",
    )

    ANNOTATIONS = (
        "annotations",
        "`annotations`: what trainers told of the turn, by trainer and step: `streams` with one value for each output "
        "id, and `scalars`",
    )


OF_A_SESSION = (
    *(Part.ADDED, Part.LOGPROBS, Part.REPLY, Part.TIMES, Part.COMPARED, Part.ANSWER),
    *(Part.RUNNING, Part.SCORE),
)
"""The values of `include` for all turns of a session: the parts that do not repeat the conversation in each turn."""
OF_A_TURN = tuple(part for part in Part if part not in (Part.RUNNING, Part.SCORE))
"""The values of `include` for one turn."""


def parse_include(text: str | None, known: Collection[Part] = OF_A_TURN) -> frozenset[Part]:
    """The parts in a comma-separated list. Raises InvalidRequest for a part that is not in `known`."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"'include' names {brief(name)}, which is none of {', '.join(known)}", param="include")
    return frozenset(map(Part, names))


def find_turn(interactions: Sequence[Interaction], name: str) -> Interaction:
    """The interaction with this id, or the complete one with this number. Raises NotFound."""
    numbers = turn_numbers(interactions)
    for interaction in interactions:
        if name in (interaction.id, str(numbers.get(interaction.id))):
            return interaction
    raise NotFound(
        f"there is no turn {brief(name)}: give the id of an interaction, or the number of a complete turn; "
        "a running turn can be read once it has ended",
        param="interaction_id",
    )


def turn_json(
    record: SessionRecord,
    interactions: Sequence[Interaction],
    turn: Interaction,
    include: Collection[Part],
    decode: Decode | None = None,
    pixels: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """A turn with the wanted parts, except for those that other modules read.

    `interactions`: all of its session, in order of `seq`. `decode`: decodes token ids to text; without it, tokens that
    differ have no text. `pixels`: see `Comparisons`.
    """
    summary = next(each for each in interactions_json(record, interactions) if each["id"] == turn.id)
    out: dict[str, Any] = {
        "session_id": turn.session_id,
        **summary,
        "state_hash": turn.state_hash,
        "stop_string": turn.stop_string,
        "cached_tokens": turn.cached_tokens,
        "reasoning_tokens": turn.reasoning_tokens,
    }
    out |= _parts(build_tree(interactions), turn, include)
    if Part.COMPARED in include:
        found = Comparisons(interactions, pixels).of(turn)
        out["compared"] = comparison_json(found, turn_numbers(interactions), decode)
    return out


def tree_json(
    record: SessionRecord,
    interactions: Sequence[Interaction],
    begun: int,
    include: Collection[Part],
    decoder: Callable[[str], Decode | None] = lambda _: None,
    pixels: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """A session with all its turns, in order of `seq`, each with the wanted parts, except for `reply` and `running`.

    `begun`: the number of calls that have not ended. `decoder`: returns the `decode` of a route. `decode` and `pixels`:
    see `turn_json`.
    """
    shown, nodes = session_json(record, interactions, begun), build_tree(interactions)
    for entry, turn in zip(shown["interactions"], interactions, strict=True):
        entry |= _parts(nodes, turn, include)
    if Part.COMPARED in include:
        every, numbers = Comparisons(interactions, pixels), turn_numbers(interactions)
        for entry, turn in zip(shown["interactions"], interactions, strict=True):
            entry["compared"] = comparison_json(every.of(turn), numbers, decoder(turn.route))
    if Part.SCORE in include:
        shown |= _score(record, interactions)
    return shown


def digests_of(interactions: Sequence[Interaction]) -> set[str]:
    """The digests of all images in messages of these interactions."""
    return {image.digest for turn in interactions for message in turn.new_messages for image in message.images}


def _score(record: SessionRecord, interactions: Sequence[Interaction]) -> dict[str, Any]:
    """The score that an export with default options gives the session."""
    scored = scored_session(record, trained_turns(interactions), LayoutOptions(unrewarded=Unrewarded.SKIP))
    return {"score": scored.scores.score, "left_out": scored.left_out}


def _parts(nodes: Mapping[str, Branch], turn: Interaction, include: Collection[Part]) -> dict[str, Any]:
    """The wanted parts of a turn that come from its node. `nodes`: the complete turns of its session."""
    node = nodes.get(turn.id) or Branch(turn, nodes.get(turn.parent_id or ""), 0)
    return {name: value for part, of in _PARTS.items() if part in include for name, value in of(node).items()}


def _messages(node: Branch) -> dict[str, Any]:
    turn, top = node.interaction, root(node).interaction
    above = conversation_above(node)
    return {
        "messages": with_tokens((*above, *turn.new_messages), images_of(node)),
        "inherited": len(above),
        "output": message_dict(turn.output),
        "tools": [tool_dict(tool) for tool in top.tools],
        "template_options": dict(top.template_options),
        "sampling": turn.sampling.to_json(),
    }


def _added(node: Branch) -> dict[str, Any]:
    turn, first = node.interaction, node.parent is None
    added = {
        "messages": with_tokens(turn.new_messages, turn.images),
        "output": message_dict(turn.output),
        "tools": [tool_dict(tool) for tool in turn.tools] if first else None,
        "template_options": dict(turn.template_options) if first else None,
        "sampling": turn.sampling.to_json(),
    }
    return {"added": added}


def _ids(node: Branch) -> dict[str, Any]:
    turn = node.interaction
    return {
        "prompt_ids": token_ids(node)[: turn.prompt_tokens].tolist(),
        "output_ids": turn.output_ids.tolist(),
    }


def _logprobs(node: Branch) -> dict[str, Any]:
    """The logprobs of an output; null if it has none."""
    turn = node.interaction
    unmasked = turn.unmasked_logprobs
    return {
        "logprobs": turn.logprobs.tolist() if turn.has_logprobs else None,
        "unmasked_logprobs": None if unmasked is None else unmasked.tolist(),
    }


def _answer(node: Branch) -> dict[str, Any]:
    """The answer as one line: white space is joined, and a long answer is truncated."""
    output = node.interaction.output
    text = " ".join(output.content[: 4 * _ANSWER_SHOWN].split())
    return {"answer": {"text": text[:_ANSWER_SHOWN], "calls": [call.name for call in output.tool_calls]}}


def _times(node: Branch) -> dict[str, Any]:
    turn = node.interaction
    names = ("created_at", "first_token_at", "completed_at")
    return {"times": {name: getattr(turn, name) for name in names}}


_PARTS: Mapping[Part, Callable[[Branch], dict[str, Any]]] = {
    Part.MESSAGES: _messages,
    Part.ADDED: _added,
    Part.IDS: _ids,
    Part.LOGPROBS: _logprobs,
    Part.TIMES: _times,
    Part.ANSWER: _answer,
}


def comparison_json(found: Comparison, numbers: Mapping[str, int], decode: Decode | None) -> dict[str, Any]:
    """A comparison, with both sides of the message shortened to the part that differs."""
    return {
        "continued": _turn(found.continued, numbers),
        "nearest": _turn(found.nearest, numbers),
        "why": found.why.value if found.why else None,
        "message": _message(found.message, numbers) if found.message else None,
        "tools": found.tools,
        "template_options": found.template_options,
        "token": _token(found.token, decode) if found.token else None,
    }


def _token(found: TokenDifference, decode: Decode | None) -> dict[str, Any]:
    sides = {"sent": found.sent, "recorded": found.recorded}
    texts = {f"{side}_text": None if decode is None else decode(ids) for side, ids in sides.items()}
    return {"index": found.index, **sides, **texts}


def _message(found: MessageDifference, numbers: Mapping[str, int]) -> dict[str, Any]:
    sent, recorded = _excerpts(found.sent, found.recorded)
    message = found.sent or found.recorded
    assert message is not None
    return {
        "index": found.index,
        "role": message.role.value,
        "why": found.why.value,
        "count": found.count,
        "of": _turn(found.owner, numbers),
        "sent": sent,
        "recorded": recorded,
    }


def _turn(interaction: Interaction | None, numbers: Mapping[str, int]) -> dict[str, Any] | None:
    if interaction is None:
        return None
    return {"interaction_id": interaction.id, "turn": numbers.get(interaction.id)}


def _excerpts(*sides: Message | None) -> list[dict[str, Any] | None]:
    """The role and text of both sides, each from shortly before the first character that differs."""
    texts = [side and message_text(message_dict(side)) for side in sides]
    one, other = (text or "" for text in texts)
    start = max(0, _first_unequal(one, other) - _SHOWN_BEFORE) if one and other else 0
    return [
        None if side is None else {"role": side.role.value, "text": _cut(text or "", start), **_beside(side)}
        for side, text in zip(sides, texts, strict=True)
    ]


def _beside(message: Message) -> dict[str, Any]:
    """The fields that identify a message, besides its text and calls."""
    return {name: value for name, value in message_dict(message).items() if name in ("tool_call_id", "images")}


def _first_unequal(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _cut(text: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
