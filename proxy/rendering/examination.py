"""Examines what works with one model: which formats are read back, which conversations are bridged and which fork.

It needs only the tokenizer and the chat template, no weights. Each check renders an answer with the chat template,
passes it to the renderer as if the model had sampled it, and compares the result with the template's rendering of the
whole conversation. The caller prints the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from proxy.rendering.renderer import Renderer
from proxy.rendering.written_answers import write_answer
from proxy.types import Ids, ImagePart, Message, Role, Tool, ToolCall, ToolChoice
from tokengrove.errors import InvalidRequest


class Verdict(StrEnum):
    """The outcome of one check."""

    HOLDS = "holds"
    FORKS = "forks"  # rendered in full: correct, but the turn begins a new branch and sample
    REFUSED = "refused"  # the template cannot express it: the client gets a 400 error with the reason
    BREAKS = "breaks"


@dataclass(frozen=True, slots=True)
class Check:
    """One conversation shape and its outcome; `detail` explains it in one line."""

    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of an examination. `facts`: pairs of a name and a finding, in display order."""

    facts: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]

    @property
    def broken(self) -> bool:
        """Whether any check breaks."""
        return any(check.verdict is Verdict.BREAKS for check in self.checks)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A conversation to check: history, answer, and new messages. `cut`: the output is cut off in the middle."""

    name: str
    history: tuple[Message, ...]
    answer: Message
    new: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    cut: bool = False


_READ = Tool("read_file", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
_SYSTEM = Message(Role.SYSTEM, "You are careful.")
_ASK = Message(Role.USER, "What does a.txt say?")
_AGAIN = Message(Role.USER, "And b.txt?")
_PLAIN = Message(Role.ASSISTANT, "It says nothing of note.")
_FOREIGN = Message(Role.ASSISTANT, "Nobody here sampled this.")
_CALLS = (ToolCall("call_0", "read_file", '{"path": "a.txt"}'), ToolCall("call_1", "read_file", '{"path": "b.txt"}'))
_ONE, _TWO = Message(Role.ASSISTANT, "", _CALLS[:1]), Message(Role.ASSISTANT, "", _CALLS)
_FIRST, _SECOND = (Message(Role.TOOL, f"content {call.id}", (), call.id) for call in _CALLS)
_THOUGHT = Message(Role.ASSISTANT, "It says nothing of note.", reasoning="I remember that file.")
_THOUGHT_CALL = Message(Role.ASSISTANT, "", _CALLS[:1], reasoning="I should read it.")

SHAPES = (
    _Shape("new user turn", (_SYSTEM, _ASK), _PLAIN, (_AGAIN,)),
    _Shape("new user turn, tools", (_ASK,), _PLAIN, (_AGAIN,), (_READ,)),
    _Shape("tool loop", (_ASK,), _ONE, (_FIRST,), (_READ,)),
    _Shape("second tool loop", (_ASK, _ONE, _FIRST), Message(Role.ASSISTANT, "", _CALLS[1:]), (_SECOND,), (_READ,)),
    _Shape("after a tool loop", (_ASK, _ONE, _FIRST), _PLAIN, (_AGAIN,), (_READ,)),
    _Shape("parallel tools", (_ASK,), _TWO, (_FIRST, _SECOND), (_READ,)),
    _Shape("result and user turn", (_ASK,), _ONE, (_FIRST, _AGAIN), (_READ,)),
    _Shape("reasoning kept", (_ASK,), _THOUGHT, (_AGAIN,)),
    _Shape("reasoning kept, tool loop", (_ASK,), _THOUGHT_CALL, (_FIRST,), (_READ,)),
    _Shape("cut by length", (_ASK,), _PLAIN, (_AGAIN,), cut=True),
    _Shape("cut inside reasoning", (_ASK,), _THOUGHT, (_AGAIN,), cut=True),
    _Shape("foreign assistant", (_ASK,), _PLAIN, (_AGAIN, _FOREIGN, _ASK)),
    _Shape("edited answer follows", (_ASK,), _PLAIN, (_FOREIGN, _AGAIN)),
    _Shape("two user turns", (_ASK,), _PLAIN, (_AGAIN, _ASK)),
    _Shape("late system message", (_SYSTEM, _ASK), _PLAIN, (_SYSTEM, _AGAIN)),
    _Shape("no new messages", (_ASK,), _PLAIN, ()),
)

_PICTURE = (ImagePart("0" * 64, 0, 64, 48), ImagePart("1" * 64, 4, 640, 480))
_SEEN, _RESULT = _AGAIN._replace(images=_PICTURE), _FIRST._replace(images=_PICTURE)

SEEING = (
    _Shape("images, user turn", (_ASK._replace(images=_PICTURE),), _PLAIN, (_SEEN,)),
    _Shape("images, tool result", (_ASK,), _ONE, (_RESULT,), (_READ,)),
    _Shape("images, system message", (_SYSTEM._replace(images=_PICTURE), _ASK), _PLAIN, (_AGAIN,)),
)
"""Shapes for vision models."""


def examine(renderer: Renderer) -> Examination:
    """Check every conversation shape. This takes a few hundredths of a second."""
    reasoning, calls = renderer.reasoning, renderer.tool_format
    facts = (
        ("family", renderer.family),
        ("renderer", renderer.why),
        ("encoder", renderer.encoder),
        ("template", renderer.template_engine),
        ("end of turn", " ".join(renderer.decode([token]) for token in renderer.stop_token_ids)),
        ("tool calls", "none known" if calls is None else f"{calls.name} ({calls.opener or 'bare'})"),
        ("reasoning", "none known" if reasoning is None else f"{reasoning.opener} ... {reasoning.closer}"),
        *([("images", f"refused: {renderer.blind}")] if renderer.blind else []),
        *([("images", str(renderer.sight)), ("processor", renderer.sight.processor)] if renderer.sight else []),
    )
    shapes = (*SHAPES, *SEEING) if renderer.has_vision else SHAPES
    return Examination(facts, tuple(check for shape in shapes for check in _checks(renderer, shape)))


def _checks(renderer: Renderer, shape: _Shape) -> Iterator[Check]:
    try:
        prompt = renderer.render(shape.history, shape.tools, {})
        output = _sampled(renderer, shape)
        if shape.cut:
            output = _cut(renderer, shape.answer, output)
        yield _bridged(renderer, shape, prompt, output)
        if not shape.cut and (shape.answer.tool_calls or shape.answer.reasoning):
            yield from _read_back(renderer, shape, prompt, output)
    except InvalidRequest as error:
        yield Check(shape.name, Verdict.REFUSED, str(error))


def _sampled(renderer: Renderer, shape: _Shape) -> Ids:
    """Return the answer of `shape` as the model would sample it, with an end token."""
    return write_answer(renderer, shape.history, shape.answer, shape.tools, {}, shape.new)


def _cut(renderer: Renderer, answer: Message, output: Ids) -> Ids:
    """Cut the output inside the reasoning if it has some, else in the middle."""
    thought = " ".join((answer.reasoning or "").split()[:2])
    inside = next((at for at in range(1, len(output)) if thought in renderer.decode(output[:at])), 0) if thought else 0
    return output[: inside or max(1, len(output) // 2)]


def _bridged(renderer: Renderer, shape: _Shape, prompt: Ids, output: Ids) -> Check:
    suffix = renderer.bridge(prompt, output, shape.answer, shape.new, shape.tools, {})
    whole = renderer.render([*shape.history, shape.answer, *shape.new], shape.tools, {})
    if suffix is None:
        return Check(
            shape.name, Verdict.FORKS, "the template rewrites earlier messages, so the turn is rendered in full"
        )
    if prompt + output + suffix == whole:
        return Check(shape.name, Verdict.HOLDS, "equals the full rendering")
    if shape.cut:
        return _closed(renderer, shape, suffix, whole)
    if suffix and whole[len(whole) - len(suffix) :] == suffix:
        return Check(shape.name, Verdict.HOLDS, "the template's own ids follow the answer as sampled")
    # Some templates move the first system message to the head, which is already written.
    if not shape.new or shape.new[0].role is not Role.SYSTEM:
        detail = f"appended {renderer.decode(suffix)!r}, but the template ends with {renderer.decode(whole[-12:])!r}"
        return Check(shape.name, Verdict.BREAKS, detail)
    return Check(
        shape.name, Verdict.HOLDS, "the system message stays in its place; the template would move it to the head"
    )


def _closed(renderer: Renderer, shape: _Shape, suffix: Ids, whole: Ids) -> Check:
    """Check the suffix of a cut turn: the ids that close the turn, then the same suffix as after a complete turn."""
    prompt = renderer.render(shape.history, shape.tools, {})
    ended = renderer.bridge(prompt, _sampled(renderer, shape), shape.answer, shape.new, shape.tools, {})
    if ended is None or suffix[len(suffix) - len(ended) :] != ended or whole[len(whole) - len(ended) :] != ended:
        return Check(shape.name, Verdict.BREAKS, f"appended {renderer.decode(suffix)!r}")
    closing = renderer.decode(suffix[: len(suffix) - len(ended)])
    return Check(shape.name, Verdict.HOLDS, f"closed with {closing!r} as context")


def _read_back(renderer: Renderer, shape: _Shape, prompt: Ids, output: Ids) -> Iterator[Check]:
    parser = renderer.parser(shape.tools, ToolChoice(), prompt)
    parser.feed(output)
    parser.finish()
    found = parser.message
    if shape.answer.tool_calls:
        name = f"{shape.name}: calls read back"
        if renderer.tool_format is None:
            yield Check(name, Verdict.BREAKS, "no known format reads the template's calls; try --tool-parser")
        elif _plain(found.tool_calls) == _plain(shape.answer.tool_calls):
            yield Check(name, Verdict.HOLDS, renderer.tool_format.name)
        else:
            yield Check(name, Verdict.BREAKS, f"{renderer.tool_format.name} misreads {renderer.decode(output)!r}")
    if shape.answer.reasoning and shape.answer.reasoning in renderer.decode(output):
        name = f"{shape.name}: reasoning read back"
        if (found.reasoning or "").strip() == shape.answer.reasoning:
            yield Check(name, Verdict.HOLDS, "")
        else:
            yield Check(name, Verdict.BREAKS, f"{renderer.decode(output)!r} is read as {found.reasoning!r}")


def _plain(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]
