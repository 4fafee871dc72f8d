"""Which earlier turns a conversation came from, by each kind of evidence, and by none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.lineage import lineage_of, lineages_of, newest_segments, segments_of, sources_of
from proxy.trajectory.returns import compute_returns
from proxy.trajectory.scored_session import scored_session
from proxy.types import Interaction, Lineage, Message, Role, SessionRecord, Thread, Tool, ToolCall
from tests.interactions import forests, interaction
from tokengrove.options.export import TrainSelection
from tokengrove.options.session import Credit, Purpose, RewardScope
from tokengrove.reasons import Evidence, Segment

SUMMARY = "1. The task is to read big.txt.\n\n\n2. Five parts were  read."
PROMPT = "Read notes.txt and say the secret word."


def turn(
    name: str,
    *messages: Message,
    output: Message | None = None,
    parent: str | None = None,
    purpose: str | None = None,
    thread: Thread | None = None,
    tools: bool = True,
) -> Interaction:
    made = interaction(name, parent=parent, seq=int(name))
    made.new_messages, made.output = messages, output or Message(Role.ASSISTANT, "done")
    made.purpose, made.thread, made.tools = purpose, thread, (Tool("bash", "", {}),) if tools else ()
    return made


def user(text: str) -> Message:
    return Message(Role.USER, text)


def calling(call_id: str, **arguments: str) -> Message:
    return Message(Role.ASSISTANT, "", (ToolCall(call_id, "task", json.dumps(arguments)),))


def found(root: Interaction, *earlier: Interaction) -> Lineage | None:
    calls = {call.id: each for each in earlier for call in each.output.tool_calls}
    return lineage_of(root, earlier[::-1], calls.get, {each.id: each for each in earlier}.get)


WORK = turn("0", user("Read big.txt."), output=calling("call_a", command="sed -n 1,150p big.txt"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (SUMMARY, user(f"Another language model started to solve this problem:\n{SUMMARY}")),
        (SUMMARY, Message(Role.ASSISTANT, SUMMARY)),
        (
            f"<analysis>\nI look back.\n</analysis>\n\n<summary>\n{SUMMARY}\n</summary>",
            user("This session is being continued.\n\nSummary:\n" + SUMMARY.replace("\n\n\n", "\n\n") + "\nContinue."),
        ),
    ],
    ids=["codex", "opencode", "claude"],
)
def test_the_text_of_a_summary_shows_where_a_conversation_goes_on(said: str, message: Message) -> None:
    summary = turn("1", parent="0", purpose=Purpose.SUMMARY, output=Message(Role.ASSISTANT, said))
    assert found(turn("2", message), WORK, summary) == Lineage(("1",), Segment.COMPACTION, Evidence.SUMMARY)
    assert found(turn("2", user("Something else.")), WORK, summary) is None
    if message.role is Role.USER:
        assert found(turn("2", message), WORK, turn("1", output=summary.output)) is None, "no summary was asked for"


def test_turns_that_were_kept_are_sources_beside_the_summary() -> None:
    summary = turn("1", purpose=Purpose.SUMMARY, output=Message(Role.ASSISTANT, SUMMARY))
    kept = turn("2", output=calling("call_b", command="ls"), parent="0")
    root = turn("3", user(SUMMARY), kept.output, Message(Role.TOOL, "big.txt", tool_call_id="call_b"))
    assert found(root, WORK, summary, kept) == Lineage(("1", "2"), Segment.COMPACTION, Evidence.SUMMARY)


def test_a_summary_that_is_asked_for_in_a_conversation_of_its_own_comes_from_the_turn_whose_calls_it_has() -> None:
    asked = turn("1", user("Read big.txt."), WORK.output, user("Summarise."), purpose=Purpose.SUMMARY, tools=False)
    assert found(asked, WORK) == Lineage(("0",), Segment.SUMMARY, Evidence.ANSWERS)
    again = turn("3", user(f"<prior-summary>{SUMMARY}</prior-summary>"), purpose=Purpose.SUMMARY)
    earlier = turn("2", purpose=Purpose.SUMMARY, output=Message(Role.ASSISTANT, SUMMARY))
    assert found(again, WORK, earlier) == Lineage(("2",), Segment.SUMMARY, Evidence.SUMMARY)


def test_the_prompt_in_a_tool_call_shows_whose_sub_agent_a_conversation_is() -> None:
    calls = turn("0", output=calling("call_a", description="look", prompt=PROMPT))
    child = turn("1", Message(Role.SYSTEM, "You are an agent."), user(f"<reminder>today</reminder>\n{PROMPT}"))
    assert found(child, calls) == Lineage(("0",), Segment.SUBAGENT, Evidence.CALL)
    assert found(turn("1", user(f"{PROMPT} Why?")), calls) is None, "it goes on"
    assert found(turn("1", user("look")), calls) is None, "too short"
    crlf = turn("1", user(f"{PROMPT}\r\nNow."), tools=False)
    asking = turn("0", output=calling("call_a", prompt=f"{PROMPT}\nNow. "))
    assert found(crlf, asking) == Lineage(("0",), Segment.SUBAGENT, Evidence.CALL)
    assert found(turn("1", user(PROMPT), Message(Role.ASSISTANT, "x"), user("y")), calls) is None, "an old conversation"


def test_an_agent_that_quotes_an_argument_is_no_sub_agent() -> None:
    """The same agent, with the same tools and system prompt, begins anew and names a path that it read before."""
    head = Message(Role.SYSTEM, "You are an agent.")
    calls = turn("0", head, user("a"), output=calling("call_a", path="/home/user/project/main.py"))
    quoting = user("Summarise this:\n/home/user/project/main.py")
    assert found(turn("1", head, quoting), calls) is None
    assert found(turn("1", head, quoting, tools=False), calls) is None, "a side call"
    other = found(turn("1", Message(Role.SYSTEM, "Look."), quoting), calls)
    assert other == Lineage(("0",), Segment.SUBAGENT, Evidence.CALL)
    assert found(turn("1", head, quoting, purpose=Purpose.SUBAGENT), calls) == other


def test_a_conversation_under_another_head_goes_on_from_its_last_turn() -> None:
    """The answer before Codex's request for a summary, which has no tools, may have no calls."""
    said = turn("1", parent="0", output=Message(Role.ASSISTANT, "Done."))
    asked = turn("2", user("Summarise."), purpose=Purpose.SUMMARY, tools=False)
    for root, kind in ((asked, Segment.SUMMARY), (turn("2"), Segment.HEAD)):
        made = lineage_of(root, [said, WORK], lambda _: WORK, lambda _: None, said)
        assert made == Lineage(("1",), kind, Evidence.MESSAGES)


def test_a_history_that_was_cut_is_known_by_an_answer_that_was_kept() -> None:
    text = Message(Role.ASSISTANT, "This is a long answer without any call.")
    old = turn("1", parent="0", output=text)
    assert found(turn("2", user("b"), text, user("c")), WORK, old) == Lineage(
        ("1",), Segment.COMPACTION, Evidence.ANSWERS
    )
    short = turn("1", output=Message(Role.ASSISTANT, "Yes."))
    assert found(turn("2", user("b"), short.output, user("c")), short) is None, "too short to tell"


def test_a_sub_agent_with_its_parents_history_is_not_a_compaction() -> None:
    child = turn("1", user("a"), WORK.output, user("You are a sub-agent now."), purpose=Purpose.SUBAGENT)
    assert found(child, WORK) == Lineage(("0",), Segment.SUBAGENT, Evidence.ANSWERS)


def test_a_clients_thread_links_what_no_text_does() -> None:
    main = turn("0", user("a"), thread=Thread("t"))
    later = turn("1", user("b"), parent="0")
    assert found(turn("2", user("c"), thread=Thread("t")), main, later) == Lineage(
        ("1",), Segment.RESET, Evidence.THREAD
    )
    child = turn("2", user("c"), thread=Thread("u", "t"))
    assert found(child, main, later) == Lineage(("1",), Segment.SUBAGENT, Evidence.THREAD)
    assert found(turn("2", user("c"), thread=Thread("v")), main, later) is None
    assert found(turn("2", user("c"), thread=Thread("t"), tools=False), main, later) is None, "a side call"
    asked = turn("2", user("c"), thread=Thread("t"), tools=False, purpose=Purpose.SUMMARY)
    assert found(asked, main, later) == Lineage(("1",), Segment.SUMMARY, Evidence.THREAD)


@pytest.mark.parametrize("side", [Purpose.TITLE, Purpose.AUX])
def test_titles_and_side_calls_are_no_segments(side: Purpose) -> None:
    title = turn("0", user("a"), thread=Thread("t"), purpose=side)
    assert found(turn("1", user("b"), thread=Thread("t")), title) is None
    assert found(turn("1", user("b"), thread=Thread("t"), purpose=side), turn("0", thread=Thread("t"))) is None


def test_unrelated_conversations_have_no_lineage() -> None:
    others: Sequence[Interaction] = [turn(str(at), user(f"question {at}"), purpose=None) for at in range(3)]
    assert found(turn("3", user("question 3")), *others) is None


def test_the_sources_of_conversations_that_go_on_are_turns_of_the_session() -> None:
    root, child = turn("1"), turn("2")
    root.lineage = Lineage(("0", "gone"), Segment.COMPACTION, Evidence.SUMMARY)
    child.lineage = Lineage(("0",), Segment.SUBAGENT, Evidence.CALL)
    below = turn("3", parent="2")
    assert sources_of([turn("0"), root, child, below]) == {"1": ("0",)}
    kinds = [Segment.NEW, Segment.COMPACTION, Segment.SUBAGENT, Segment.SUBAGENT]
    assert list(segments_of([turn("0"), root, child, below]).values()) == kinds


def linked(name: str, kind: Segment, *sources: str, reward: float | None = None) -> Interaction:
    made = interaction(name, reward=reward, seq=int(name))
    made.lineage = Lineage(sources, kind, Evidence.SUMMARY)
    return made


def chain(name: str, parent: str | None, reward: float | None = None) -> Interaction:
    return interaction(name, parent=parent, prefix=1 if parent else 0, reward=reward, seq=int(name))


def test_returns_go_over_compactions_and_into_summaries() -> None:
    """Two turns, a summary of them, and two turns after it, the last one rewarded."""
    turns = [chain("0", None), chain("1", "0"), chain("2", "1"), linked("3", Segment.COMPACTION, "2")]
    turns.append(chain("4", "3", 1.0))
    assert compute_returns(turns, 0.5, Credit.LINEAGE) == {"0": 0.0625, "1": 0.125, "2": 0.25, "3": 0.5, "4": 1.0}
    assert compute_returns(turns, 0.5, Credit.TREE) == {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.5, "4": 1.0}


def test_a_kept_turn_and_the_summary_before_it_both_earn_what_comes_after() -> None:
    """Claude Code: turn 1 is kept, and turn 2 is a summary of what came before it."""
    turns = [chain("0", None), chain("1", "0"), chain("2", "0"), linked("3", Segment.COMPACTION, "2", "1", reward=1.0)]
    assert compute_returns(turns, 1.0, Credit.LINEAGE) == dict.fromkeys("0123", 1.0)


def test_a_sub_agent_earns_what_the_turn_earns_that_got_its_answer() -> None:
    """Turn 0 calls, turns 1 and 2 are the sub-agent's, turn 3 goes on with its answer, or in the background before."""
    child, after = linked("1", Segment.SUBAGENT, "0"), chain("3", "0", 1.0)
    turns = [chain("0", None), child, chain("2", "1"), after]
    assert compute_returns(turns, 0.5, Credit.LINEAGE) == {"0": 0.5, "1": 0.25, "2": 0.5, "3": 1.0}
    early = [turns[0], chain("1", "0", 1.0), linked("2", Segment.SUBAGENT, "0"), chain("3", "2")]
    assert compute_returns(early, 0.5, Credit.LINEAGE) == {"0": 0.5, "1": 1.0, "2": 0.25, "3": 0.5}


def test_a_summary_that_nothing_goes_on_from_takes_no_credit() -> None:
    turns = [chain("0", None), chain("1", "0"), chain("2", "0"), linked("3", Segment.COMPACTION, "2", reward=1.0)]
    for each in turns[1:3]:
        each.purpose = Purpose.SUMMARY
    assert compute_returns(turns, 1.0, Credit.LINEAGE) == {"0": 1.0, "1": 0.0, "2": 1.0, "3": 1.0}


def test_only_the_last_turn_of_a_sub_agent_earns_what_its_answer_was_for() -> None:
    """Turns 1 to 3 are the sub-agent's: turn 2 is a fork that leads nowhere."""
    turns = [
        chain("0", None),
        linked("1", Segment.SUBAGENT, "0"),
        chain("2", "1"),
        chain("3", "1"),
        chain("4", "0", 1.0),
    ]
    assert compute_returns(turns, 1.0, Credit.LINEAGE) == {"0": 1.0, "1": 0.5, "2": 0.0, "3": 1.0, "4": 1.0}


@given(forests(), st.floats(0, 1))
def test_without_links_credit_by_lineage_is_that_by_tree(nodes: list[Interaction], discount: float) -> None:
    for node in nodes:
        node.reward = float(node.seq % 3)
    by_tree = compute_returns(nodes, discount, Credit.TREE)
    assert compute_returns(nodes, discount, Credit.LINEAGE) == pytest.approx(by_tree)


def test_thousands_of_turns_need_no_recursion() -> None:
    turns = [chain("0", None), *(chain(str(at), str(at - 1)) for at in range(1, 5000))]
    turns[-1].reward = 1.0
    assert set(compute_returns(turns, 1.0, Credit.LINEAGE).values()) == {1.0}


def options(**more: Any) -> LayoutOptions:
    return LayoutOptions(reward_scope=RewardScope.PATH, credit=Credit.LINEAGE, **more)


def test_each_sample_of_a_lineage_has_its_score_and_a_group_counts_it_once() -> None:
    """Three segments: rewards 0.5 in the first and 1 in the last."""
    turns = [chain("0", None, 0.5), chain("1", "0"), linked("2", Segment.COMPACTION, "1"), chain("3", "2")]
    turns += [linked("4", Segment.COMPACTION, "3", reward=1.0)]
    record = SessionRecord("s", group_id="g")
    scored = scored_session(record, turns, options())
    assert [each.score for each in scored.values()] == [1.5], "one value for three samples"
    assert [row.rewards.tolist() for row in lay_out(record, turns, options()).paths] == [[1.5]] * 3
    own = lay_out(record, turns, replace(options(), credit=Credit.TREE))
    assert [row.rewards.tolist() for row in own.paths] == [[0.5], [0.0], [1.0]]


def test_segments_can_be_selected() -> None:
    turns = [
        chain("0", None),
        chain("1", "0"),
        linked("2", Segment.COMPACTION, "1"),
        linked("3", Segment.SUBAGENT, "0"),
    ]
    for kind, names in ((Segment.NEW, {"1"}), (Segment.COMPACTION, {"2"}), (Segment.SUBAGENT, {"3"})):
        found = lay_out(SessionRecord("s"), turns, options(segments=frozenset({kind})))
        assert {row.last.id for row in found.paths} == names


def test_the_newest_conversations_of_each_lineage_are_trained() -> None:
    """Three conversations, with a summary that is asked for between the last two, and a sub-agent's."""
    turns = [
        chain("0", None),
        chain("1", "0"),
        linked("2", Segment.SUBAGENT, "1"),
        linked("3", Segment.COMPACTION, "1"),
    ]
    turns += [linked("4", Segment.SUMMARY, "3"), linked("5", Segment.COMPACTION, "4")]
    for most, names in ((1, {"2", "4", "5"}), (2, {"2", "3", "4", "5"}), (3, set("012345"))):
        assert newest_segments(turns, most) == names
        found = lay_out(SessionRecord("s"), turns, options(train=TrainSelection(max_segments=most)))
        trained = {placed.interaction.id for row in found.paths for placed in row.placements if placed.trains}
        assert trained == names
        assert found.counts(options())["untrained_tokens"] == ({"train": 6 - len(names)} if most < 3 else {})
    assert {each["first"] for each in lineages_of(turns)} == {"0", "2"}


def test_a_tool_result_that_quotes_a_summary_shows_nothing() -> None:
    summary = turn("1", purpose=Purpose.SUMMARY, output=Message(Role.ASSISTANT, SUMMARY))
    quoted = Message(Role.TOOL, SUMMARY, tool_call_id="other")
    assert found(turn("2", user("Go on."), quoted), WORK, summary) is None


def test_of_several_kept_turns_the_newest_is_the_source_even_if_only_its_result_is_there() -> None:
    later = turn("1", output=calling("call_b", command="ls"), parent="0")
    result = Message(Role.TOOL, "big.txt", tool_call_id="call_b")
    for messages in ((WORK.output, later.output), (later.output, WORK.output), (WORK.output, result), (result,)):
        assert found(turn("2", user("Go on."), *messages), WORK, later) == Lineage(
            ("1",), Segment.COMPACTION, Evidence.ANSWERS
        )


def test_a_prompt_is_only_looked_for_in_messages_of_the_user() -> None:
    calls = turn("0", output=calling("call_a", prompt=PROMPT))
    assert found(turn("1", Message(Role.SYSTEM, PROMPT), user("Begin.")), calls) is None


@pytest.mark.parametrize("arguments", ["[1]", "null", "3", "{", ""])
def test_arguments_that_are_no_object_have_no_prompt(arguments: str) -> None:
    calls = turn("0", output=Message(Role.ASSISTANT, "", (ToolCall("call_a", "task", arguments),)))
    assert found(turn("1", user(PROMPT)), calls) is None


def test_a_summary_is_no_turn_that_a_thread_goes_on_from() -> None:
    asked = turn("1", user("Summarise."), parent="0", purpose=Purpose.SUMMARY)
    found_ = found(turn("2", user("c"), thread=Thread("t")), turn("0", user("a"), thread=Thread("t")), asked)
    assert found_ == Lineage(("0",), Segment.RESET, Evidence.THREAD)


def test_a_sub_agent_that_was_compacted_earns_what_its_caller_gets_and_only_that() -> None:
    """Turn 0 calls; turn 1 and, after a compaction, 2 are the sub-agent's; 3 goes on with the answer, 4 does not."""
    turns = [chain("0", None), linked("1", Segment.SUBAGENT, "0"), linked("2", Segment.COMPACTION, "1")]
    turns += [chain("3", "0", 1.0), linked("4", Segment.COMPACTION, "0", reward=0.0)]
    found = compute_returns(turns, 0.5, Credit.LINEAGE)
    assert found == {"0": 0.25, "1": 0.25, "2": 0.5, "3": 1.0, "4": 0.0}


def test_a_summary_that_calls_a_tool_is_one_source() -> None:
    said = Message(Role.ASSISTANT, SUMMARY, (ToolCall("call_s", "note", "{}"),))
    summary = turn("1", purpose=Purpose.SUMMARY, output=said)
    assert found(turn("2", said, user("Go on.")), WORK, summary) == Lineage(
        ("1",), Segment.COMPACTION, Evidence.SUMMARY
    )


def test_a_summary_before_conversations_that_are_not_trained_is_not_either() -> None:
    turns = [chain("0", None), linked("1", Segment.SUMMARY, "0"), linked("2", Segment.COMPACTION, "1")]
    turns += [linked("3", Segment.SUMMARY, "2"), linked("4", Segment.COMPACTION, "3")]
    assert newest_segments(turns, 1) == {"3", "4"}


def test_a_conversation_keeps_its_score_if_the_filter_leaves_out_what_goes_on_from_it() -> None:
    turns = [chain("0", None, 0.5), chain("1", "0", 1.0), linked("2", Segment.COMPACTION, "1", reward=2.0)]
    how = options(segments=frozenset({Segment.NEW}))
    scored = scored_session(SessionRecord("s", group_id="g"), turns, how)
    assert len(scored.values()) == 1
    (row,) = lay_out(SessionRecord("s"), turns, how).paths
    assert row.rewards.tolist() != [0.0] and row.weighting.score is not None


def test_paths_go_on_over_summaries_that_the_filter_leaves_out() -> None:
    turns = [chain("0", None), chain("1", "0"), linked("2", Segment.COMPACTION, "1", reward=2.0)]
    turns[1].purpose = Purpose.SUMMARY
    rows = lay_out(SessionRecord("s"), turns, options(purposes=frozenset({"main"}))).paths
    assert [row.rewards.tolist() for row in rows] == [[2.0], [2.0]]


def test_a_side_call_does_not_hide_the_thread_of_the_agent() -> None:
    main = turn("0", user("a"), thread=Thread("t"))
    side = turn("1", user("topic?"), thread=Thread("t"), tools=False)
    assert found(turn("2", user("c"), thread=Thread("t")), main, side) == Lineage(
        ("0",), Segment.RESET, Evidence.THREAD
    )
