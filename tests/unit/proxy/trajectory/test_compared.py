"""The nearest turn of a fork, and the first thing that differs from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.trajectory.compared import Comparison, Comparisons, turn_numbers
from proxy.types import Api, ImagePart, Interaction, Message, Role, Tool, ToolCall
from tests.interactions import interaction
from tokengrove.reasons import Differs, Reason, Status

SYSTEM = Message(Role.SYSTEM, "be kind")
ASK, MORE, LAST, NEW = (Message(Role.USER, text) for text in ("ask", "more", "last", "new"))
CALL = ToolCall("call_1", "add", '{"a": 1, "b": 2}')
RESULT = Message(Role.TOOL, "3", tool_call_id="call_1")


def said(text: str, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, text, tool_calls=calls)


class Told:
    """The turns of a session, stored one after the other."""

    def __init__(self) -> None:
        self.turns: list[Interaction] = []

    def turn(self, *new: Message, to: int | None = None, says: Message | None = None, **fields: object) -> None:
        number = len(self.turns)
        made = interaction(str(number), parent=None if to is None else str(to), seq=number)
        self.turns.append(
            replace(made, new_messages=new, output=says or said(f"answer {number}"), **fields)  # type: ignore[arg-type]
        )

    def fork(
        self, *new: Message, to: int | None = None, reason: Reason = Reason.REWRITTEN, **more: object
    ) -> Comparison:
        self.turn(*new, to=to, reason=reason, **more)  # type: ignore[arg-type]
        return Comparisons(self.turns).of(self.turns[-1])


@pytest.fixture
def told() -> Told:
    """Three turns of one conversation."""
    session = Told()
    session.turn(SYSTEM, ASK)
    session.turn(MORE, to=0)
    session.turn(LAST, to=1)
    return session


def test_a_turn_that_goes_on_has_only_its_parent(told: Told) -> None:
    assert Comparisons(told.turns).of(told.turns[0]) == Comparison()
    assert Comparisons(told.turns).of(told.turns[2]) == Comparison(continued=told.turns[1])


def test_an_edited_answer_is_named_with_its_turn_and_both_sides(told: Told) -> None:
    found = told.fork(SYSTEM, ASK, said("edited"), MORE, said("answer 1"), NEW)
    assert (found.continued, found.nearest, found.why) == (None, told.turns[1], Differs.CONTENT)
    message = found.message
    assert message is not None
    assert (message.index, message.owner) == (2, told.turns[0])
    assert (message.sent, message.recorded) == (said("edited"), said("answer 0"))
    assert (found.tools, found.template_options, found.token) == (None, None, None)


def test_below_a_parent_only_its_other_children_are_compared(told: Told) -> None:
    found = told.fork(Message(Role.USER, "instead"), to=0, reason=Reason.BRANCHED)
    assert (found.continued, found.nearest, found.why) == (told.turns[0], told.turns[1], Differs.CONTENT)
    assert found.message is not None
    assert (found.message.index, found.message.sent, found.message.recorded) == (3, Message(Role.USER, "instead"), MORE)


def test_an_edit_deep_below_a_parent_names_the_turn_that_brought_the_message(told: Told) -> None:
    found = told.fork(MORE, said("cut"), LAST, said("answer 2"), ASK, to=0)
    assert (found.nearest, found.why) == (told.turns[2], Differs.CONTENT)
    assert found.message is not None
    assert (found.message.index, found.message.owner) == (4, told.turns[1])


def test_the_same_conversation_has_no_message_that_differs(told: Told) -> None:
    found = told.fork(MORE, to=0, reason=Reason.RESAMPLED)
    assert (found.continued, found.nearest, found.why, found.message) == (
        *(told.turns[0], told.turns[1]),
        *(Differs.SAME, None),
    )


def test_a_changed_system_prompt_is_the_first_message_of_the_turn_that_would_have_gone_on(told: Told) -> None:
    clock = Message(Role.SYSTEM, "be kind, it is 9:01")
    found = told.fork(clock, ASK, said("answer 0"), MORE, said("answer 1"), NEW, reason=Reason.SYSTEM_CHANGED)
    assert found.nearest is told.turns[1]
    assert found.message is not None
    assert (found.message.index, found.message.sent, found.why) == (0, clock, Differs.CONTENT)


def test_changed_tools_and_options_are_listed(told: Told) -> None:
    told.turns[0].tools = (Tool("add"), Tool("sub"), Tool("mul", "multiplies"))
    again = (SYSTEM, ASK, said("answer 0"), NEW)
    found = told.fork(*again, tools=(Tool("add"), Tool("mul", "times"), Tool("div")), reason=Reason.TOOLS_CHANGED)
    assert found.tools == {"added": ["div"], "removed": ["sub"], "changed": ["mul"]}
    assert (found.why, found.nearest) == (Differs.TOOLS, told.turns[0])
    found = told.fork(
        *(SYSTEM, ASK), tools=told.turns[0].tools, template_options={"think": False}, reason=Reason.OPTIONS_CHANGED
    )
    assert (found.why, found.nearest) == (Differs.TEMPLATE_OPTIONS, told.turns[0])
    assert found.template_options == {"sent": {"think": False}, "recorded": {}}


@pytest.mark.parametrize(
    ("history", "why", "index", "count"),
    [
        ([SYSTEM, MORE, said("answer 1"), LAST, said("answer 2"), ASK], Differs.REMOVED, 1, 2),
        ([SYSTEM, Message(Role.USER, "note"), ASK, said("answer 0"), MORE], Differs.INSERTED, 1, 1),
        ([SYSTEM, said("summary"), LAST], Differs.ROLE, 1, 1),
    ],
)
def test_removed_and_inserted_messages_are_counted(
    told: Told, history: list[Message], why: Differs | None, index: int | None, count: int | None
) -> None:
    found = told.fork(*history)
    message = found.message
    assert message is not None
    assert (found.why, message.index, message.count) == (why, index, count)


OTHER_CALL = CALL._replace(arguments='{"a": 2, "b": 2}')


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ([ASK, said("I add.", OTHER_CALL), RESULT], Differs.TOOL_CALLS),
        ([ASK, said("I add."), NEW], Differs.TOOL_CALLS),
        ([ASK, said("Adding.", CALL), RESULT], Differs.CONTENT),
        ([ASK, said("I add.", CALL), RESULT._replace(tool_call_id="call_9")], Differs.TOOL_CALL_ID),
        ([ASK._replace(images=(ImagePart("digest"),)), said("I add.", CALL), NEW], Differs.IMAGES),
    ],
)
def test_calls_results_and_images_are_told_apart(history: list[Message], why: Differs) -> None:
    session = Told()
    session.turn(ASK, says=said("I add.", CALL))
    session.turn(RESULT, to=0)
    assert session.fork(*history).why is why
    assert session.fork(RESULT._replace(content="4"), to=0, reason=Reason.BRANCHED).why is Differs.CONTENT


SHOWN = ImagePart("first", 1, 64, 48)
ANEW = SHOWN._replace(digest="anew")


@pytest.mark.parametrize(
    ("content", "image", "why"),
    [
        ("ask", ANEW, Differs.ENCODED_ANEW),
        ("another", ANEW, Differs.IMAGES),
        ("ask", ANEW._replace(at=0), Differs.IMAGES),
        ("ask", ANEW._replace(detail="low"), Differs.IMAGES),
        ("ask", SHOWN._replace(detail="low"), Differs.IMAGES),
        ("ask", SHOWN._replace(digest="unknown"), Differs.IMAGES),
    ],
)
def test_a_picture_is_encoded_anew_only_if_all_else_of_its_message_is_the_same(
    content: str, image: ImagePart, why: Differs
) -> None:
    session = Told()
    session.turn(ASK._replace(images=(SHOWN,)))
    session.turn(Message(Role.USER, content, images=(image,)), reason=Reason.NEW_ROOT)
    found = Comparisons(session.turns, {"first": "same", "anew": "same"}).of(session.turns[1])
    assert found.why is why


def test_what_identity_ignores_is_no_difference(told: Told) -> None:
    """White space, reasoning, and the ids and spelling of calls."""
    spaced = CALL._replace(id="theirs", arguments='{"b":2,"a":1}')
    session = Told()
    session.turn(ASK, says=said("I add.", CALL))
    session.turn(RESULT, to=0)
    found = session.fork(ASK, said("\nI add. ", spaced), RESULT._replace(tool_call_id="theirs"), said("other"), LAST)
    assert found.message is not None
    assert (found.message.index, found.message.owner) == (3, session.turns[1])


def test_an_unaligned_turn_shows_the_first_token_that_the_template_changed() -> None:
    session = Told()
    session.turns = [interaction("0", suffix=(1, 2, 3), output=(4, 5))]
    session.turns.append(replace(interaction("1", parent="0", suffix=(1, 2, 9, 4), seq=1), reason=Reason.TEMPLATE))
    found = Comparisons(session.turns).of(session.turns[1])
    assert (found.continued, found.nearest, found.why) == (session.turns[0], session.turns[0], Differs.TOKENS)
    assert found.token is not None
    assert (found.token.index, found.token.sent, found.token.recorded) == (2, (9, 4), (3, 4, 5))


def test_prompts_of_token_ids_are_compared_token_by_token() -> None:
    session = Told()
    for number, prompt in enumerate([(1, 2, 3), (1, 7), (1, 2, 9)]):
        made = interaction(str(number), suffix=prompt, seq=number)
        session.turns.append(replace(made, api=Api.GENERATE, reason=Reason.NEW_ROOT))
    found = Comparisons(session.turns).of(session.turns[2])
    assert found.nearest is session.turns[0]
    assert found.token is not None
    assert (found.token.index, found.token.sent) == (2, (9,))
    assert Comparisons(session.turns).of(session.turns[0]) == Comparison()


def test_only_committed_and_earlier_turns_are_compared(told: Told) -> None:
    told.turns[2].status = Status.FAILED
    found = told.fork(SYSTEM, ASK, said("edited"), MORE, said("answer 1"), LAST)
    assert found.nearest is told.turns[1]
    later = replace(told.turns[0], id="later", seq=9, new_messages=told.turns[3].new_messages)
    assert Comparisons([*told.turns, later]).of(told.turns[3]).nearest is told.turns[1]


def test_a_turn_whose_parent_came_too_late_is_said_to_be_late(told: Told) -> None:
    found = told.fork(SYSTEM, ASK, said("answer 0"), reason=Reason.NEW_ROOT)
    assert (found.nearest, found.why) == (told.turns[0], Differs.LATE)


def test_numbers_count_complete_turns_only(told: Told) -> None:
    told.turns[1].status = Status.FAILED
    assert turn_numbers(told.turns) == {"0": 0, "2": 1}
