"""What readers of a running turn see, and when: nothing that closes a tool call before the commit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.images.image_pool import ImagePool
from proxy.prompt_ids import PromptIds
from proxy.rendering.deltas import Delta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.trajectory.cache import InteractionCache, Match
from proxy.trajectory.matching import identify
from proxy.turns.generation import Generation
from proxy.turns.plan import ReplyPlan, make_turns
from proxy.turns.prompts import Prompt
from proxy.turns.route import EngineRoute
from proxy.turns.turn import Turn
from proxy.types import Api, Ids, ImageFile, Message, Role, SamplingParams, SessionRecord, Tool, TurnRequest, ids_of
from tests.support import call_text, sampled, tiny_renderer
from tokengrove.options.model import RouteKind
from tokengrove.reasons import LogprobsOf

FIRST_CALL: list[Delta] = [
    ToolCallStart(0, "call_a", "add"),
    ToolCallArguments(0, '{"a"'),
    ToolCallArguments(0, ": "),
    ToolCallArguments(0, "1}"),
    ToolCallEnd(0),
]
SECOND_CALL: list[Delta] = [
    ToolCallStart(1, "call_b", "add"),
    ToolCallArguments(1, '{"a": '),
    ToolCallArguments(1, "2}"),
    ToolCallEnd(1),
]


async def no_images(digests: Sequence[str]) -> Sequence[ImageFile]:
    return ()


def new_turn(**asked: Any) -> Turn:
    request = TurnRequest(Api.CHAT, "m", (Message(Role.USER, "hi"),), **asked)
    identity = identify(request.messages, request.tools, request.template_options)
    plan = ReplyPlan(
        session=LiveSession(SessionRecord("s"), InteractionCache()),
        request=request,
        route=cast(EngineRoute, SimpleNamespace(renderer=tiny_renderer(), gate=None, kind=RouteKind.POLICY)),
        prompt=Prompt(PromptIds(ids_of([1, 2])), Match(None, 0), request.messages, identity, bridged=False),
        sampling=SamplingParams(max_tokens=200),
        grammar=None,
        best_effort=(),
        reply_id="reply",
        pool=ImagePool(no_images, 0),
    )
    plan.attempt = Attempt("key")
    (turn,) = make_turns(plan)
    return turn


@pytest.mark.parametrize(
    ("deltas", "shown"),
    [
        ([TextDelta("hello")], 1),
        (FIRST_CALL, 3),
        (FIRST_CALL + SECOND_CALL, 3),
        ([TextDelta("hello"), *FIRST_CALL, *SECOND_CALL, TextDelta("bye")], 4),
        ([ToolCallStart(0, "call_a", "now"), ToolCallArguments(0, "{}"), ToolCallEnd(0)], 1),
        ([ToolCallStart(0, "call_a", "now"), ToolCallEnd(0), *SECOND_CALL], 1),
        ([ToolCallStart(0, "call_a", "now"), SECOND_CALL[0], ToolCallEnd(0), *SECOND_CALL[1:]], 2),
    ],
)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_last_arguments_of_a_call_and_all_after_them_are_held_until_the_commit(
    deltas: list[Delta], shown: int, one_by_one: bool
) -> None:
    turn = new_turn()
    for batch in [[delta] for delta in deltas] if one_by_one else [deltas]:
        turn.publish(batch)
    assert turn.deltas == deltas[:shown]
    turn.release()
    assert turn.deltas == deltas


def test_earlier_arguments_of_an_open_call_are_shown_as_they_come() -> None:
    turn = new_turn()
    for count, delta in enumerate(FIRST_CALL[:4]):
        turn.publish([delta])
        assert turn.deltas == FIRST_CALL[: max(count, 1)]


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"parallel_tool_calls": False}])
@pytest.mark.parametrize("size", [2, 3, 7, 99])
def test_a_turn_is_the_same_however_its_tokens_are_chunked(asked: dict[str, Any], size: int) -> None:
    text = "<think>\nhm 🙂 so\n</think>\n\none two 日本 " + call_text("add", '{"a": 1}') + "\n" + call_text("add", "{}")
    single, chunked = (taken(new_turn(tools=(Tool("add"),), **asked), sampled(text), count) for count in (1, size))
    for field in ("output_ids", "logprobs", "versions"):
        assert getattr(chunked.interaction, field) == getattr(single.interaction, field)
    entries = [turn.report.entries if turn.report is not None else None for turn in (single, chunked)]
    assert entries[0] == entries[1] and bool(entries[0]) == ("logprobs" in asked)
    assert chunked.parser.reasoning_tokens == single.parser.reasoning_tokens > 0
    chosen, expected = chunked.parser.message, single.parser.message
    assert (chosen.content, chosen.reasoning) == (expected.content, expected.reasoning)
    assert len(chosen.tool_calls) == len(expected.tool_calls) == (1 if "parallel_tool_calls" in asked else 2)


def taken(turn: Turn, ids: Ids, size: int) -> Turn:
    """Give `ids` to a turn, each with a logprob of its own, until it ends."""
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        logprobs = array("f", (-(start + index) / 64 for index in range(len(piece))))
        if turn.take(TokenChunk(piece, logprobs, version=0)) is not None:
            break
    turn.publish(turn.parser.finish())
    return turn


def test_a_watcher_is_called_whenever_readers_may_see_more() -> None:
    turn, seen = new_turn(), []
    turn.watchers.append(lambda: seen.append(len(turn.deltas)))
    turn.publish([TextDelta("a"), TextDelta("b")])
    turn.publish(FIRST_CALL)
    turn.release()
    assert seen == [2, 5, 7]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], "rule"),
        (["rule", "sampled"], "sampled"),
        (["sampled", "model", "rule"], "model"),
        (["model", "sampled"], "model"),
    ],
)
def test_of_parts_that_differ_in_logprobs_of_the_one_furthest_from_the_rule_is_kept(
    words: list[str], kept: str
) -> None:
    turn, generation = new_turn(), Generation()
    for word in words:
        chunk = TokenChunk(ids_of([300]), array("f", [-1.0]), logprobs_of=LogprobsOf(word))
        turn.take(chunk)
        generation.take(chunk)
    assert turn.interaction.logprobs_of is generation.logprobs_of is LogprobsOf(kept)
