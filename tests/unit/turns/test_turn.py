"""What readers of a running turn see, and when: nothing that closes a tool call before the commit."""

from __future__ import annotations

import pytest

from proxy.rendering.deltas import Delta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.trajectory.cache import InteractionCache, Match
from proxy.trajectory.matching import identify
from proxy.turns.plan import ReplyPlan, make_turns
from proxy.turns.prompts import Prompt
from proxy.turns.turn import Turn
from proxy.types import Api, Message, Role, SamplingParams, SessionRecord, TurnRequest, ids_of
from tests.support import tiny_renderer

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


def new_turn() -> Turn:
    request = TurnRequest(Api.CHAT, "m", (Message(Role.USER, "hi"),))
    identity = identify(request.messages, request.tools, request.template_options)
    plan = ReplyPlan(
        session=LiveSession(SessionRecord("s"), InteractionCache()),
        request=request,
        prompt=Prompt(ids_of([1, 2]), Match(None, 0), identity, bridged=False),
        sampling=SamplingParams(max_tokens=9),
        grammar=None,
        attempt=Attempt("key"),
        reply_id="reply",
    )
    (turn,) = make_turns(plan, tiny_renderer())
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
