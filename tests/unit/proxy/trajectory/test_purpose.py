"""Purposes: stated by a header or a known prompt, or derived from the whole tree; exports filter on them."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import export_session
from proxy.trajectory.purpose import derive_purposes, purpose_of_prompt
from proxy.types import Api, Interaction, Message, Role, SessionRecord, Tool, TurnRequest
from tests.interactions import interaction
from tokengrove.options.export import Layout
from tokengrove.options.session import Purpose

TOOLS = (Tool("read"),)


def root(name: str, seq: int, first: str, *, tooled: bool = False, system: str = "S") -> Interaction:
    messages = (Message(Role.SYSTEM, system), Message(Role.USER, first))
    return replace(interaction(name, seq=seq), new_messages=messages, tools=TOOLS if tooled else ())


def ask(last: str, system: str = "") -> TurnRequest:
    return TurnRequest(Api.CHAT, "m", (Message(Role.SYSTEM, system), Message(Role.USER, last)))


def test_a_session_of_one_root_is_main() -> None:
    assert derive_purposes([root("a", 0, "q"), interaction("b", parent="a", seq=1)]) == {"a": "main", "b": "main"}


def test_a_title_call_that_came_first_is_aux_beside_a_tooled_root() -> None:
    nodes = [root("t", 0, "name this", system="T"), root("a", 1, "q", tooled=True)]
    assert derive_purposes(nodes) == {"t": "aux", "a": "main"}
    assert derive_purposes(nodes[:1]) == {"t": "main"}


def test_a_tooled_root_with_another_system_and_beginning_is_a_subagent() -> None:
    nodes = [
        root("a", 0, "q", tooled=True),
        root("b", 1, "look around", tooled=True, system="You explore."),
        interaction("c", parent="b", seq=2),
        root("d", 3, "q", tooled=True, system="S2"),
    ]
    assert derive_purposes(nodes) == {"a": "main", "b": "subagent", "c": "subagent", "d": "main"}


SYSTEM = "You are a coding agent with tools.\nToday is {}. Work in /repo and keep to the plan."


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2026-11-22", "2026-11-23"),
        ("2026-11-22T23:59:58.123Z", "2026-11-23T00:00:01.5Z"),
        ("Sun Nov 22 23:59:58 UTC 2026", "Mon Nov 23 00:00:01 UTC 2026"),
        ("Thu Dec 31 23:59:58 UTC 2026", "Fri Jan  1 00:00:01 UTC 2027"),
        ("Sunday, November 22, 2026, 9:05 AM", "Wednesday, December 2, 2026, 10:05 p.m."),
        ("22 November 2026", "1st of Dec. 2026"),
        ("11/22/2026", "12/1/2026"),
        ("20261122", "20261201"),
        ("20261122T235958Z", "20261123T000001Z"),
        ("22.11.26", "1.12.26"),
        ("2026年11月22日", "2026年12月1日"),
        ("1795301174", "1795301999.25"),
        ("9 am", "10 pm"),
        ("November 2026", "December 2026"),
    ],
)
def test_a_compaction_whose_system_prompt_has_another_date_goes_on_as_main(before: str, after: str) -> None:
    nodes = [
        root("a", 0, "fix the bug", tooled=True, system=SYSTEM.format(before)),
        root("b", 1, "This is a summary of the conversation so far.", tooled=True, system=SYSTEM.format(after)),
        interaction("c", parent="b", seq=2),
    ]
    assert derive_purposes(nodes) == {"a": "main", "b": "main", "c": "main"}


@pytest.mark.parametrize(
    "system",
    [
        SYSTEM.format("2026-11-23").replace("coding", "review"),
        SYSTEM.format("the 2nd step"),
        SYSTEM.format("2026-11-23") + " Answer in one word.",
        "You are agent 2.",
    ],
)
def test_a_system_prompt_that_differs_in_more_than_a_date_is_a_subagents(system: str) -> None:
    first = "You are agent 1." if "agent 2" in system else SYSTEM.format("2026-11-22")
    nodes = [root("a", 0, "q", tooled=True, system=first), root("b", 1, "look", tooled=True, system=system)]
    assert derive_purposes(nodes) == {"a": "main", "b": "subagent"}


def test_a_stored_purpose_is_kept_and_a_summary_is_one_call() -> None:
    nodes = [
        replace(root("a", 0, "q"), purpose="subagent"),
        replace(interaction("b", parent="a", seq=1), purpose="summary"),
        interaction("c", parent="b", seq=2),
    ]
    assert derive_purposes(nodes) == {"a": "subagent", "b": "summary", "c": "main"}


@pytest.mark.parametrize(
    ("request_", "purpose"),
    [
        (ask("hi", "You are a title generator. You output ONLY a thread title."), Purpose.TITLE),
        (ask("Your task is to create a detailed summary of the conversation so far, paying"), Purpose.SUMMARY),
        (ask("No tools.\n\nYour task is to create a detailed summary of the RECENT portion"), Purpose.SUMMARY),
        (ask("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."), Purpose.SUMMARY),
        (ask("<conversation>", "You are a context summarization agent. You are given"), Purpose.SUMMARY),
        (ask("please create a summary", "You are an agent."), None),
    ],
)
def test_prompts_of_known_clients_state_their_purpose(request_: TurnRequest, purpose: Purpose | None) -> None:
    assert purpose_of_prompt(request_.messages) is purpose


def test_exports_filter_on_purpose_and_shared_tokens_move_to_another_leaf() -> None:
    nodes = [
        interaction("a", seq=0),
        replace(interaction("b", parent="a", prefix=2, seq=1), purpose="summary"),
        interaction("c", parent="a", prefix=2, seq=2),
    ]
    record = SessionRecord("s")
    everything = export_session(record, nodes, LayoutOptions(layout=Layout.CONCAT))
    assert [int(sample.arrays.loss_mask.sum()) for sample in everything] == [2, 1]
    options = LayoutOptions(layout=Layout.CONCAT, purposes=frozenset({"main"}))
    (main,) = export_session(record, nodes, options)
    assert (main.last.id, main.purpose, int(main.arrays.loss_mask.sum())) == ("c", "main", 2)
    singles = export_session(record, nodes, LayoutOptions(layout=Layout.INDIVIDUAL, purposes=frozenset({"summary"})))
    assert [sample.last.id for sample in singles] == ["b"]


def test_exports_filter_on_agents() -> None:
    nodes = [replace(interaction("a", seq=0), agent="x"), replace(interaction("b", seq=1), agent="y")]
    options = LayoutOptions(layout=Layout.CONCAT, agents=frozenset({"y"}))
    assert [sample.last.id for sample in export_session(SessionRecord("s"), nodes, options)] == ["b"]


def test_a_stated_root_with_tools_is_no_standard_for_the_others() -> None:
    nodes = [
        replace(root("t", 0, "name this", tooled=True, system="T"), purpose="title"),
        root("a", 1, "q", tooled=True),
        root("b", 2, "look up", tooled=True),
    ]
    assert derive_purposes(nodes) == {"t": "title", "a": "main", "b": "main"}


@pytest.mark.parametrize("length", [99_000, 200_000])
def test_the_purpose_of_a_system_prompt_does_not_depend_on_its_length(length: int) -> None:
    words = ("long " * (length // 5))[:length]
    prompt = [Message(Role.SYSTEM, words + "You are a title generator. You output ONLY a thread title.")]
    assert purpose_of_prompt(prompt) is Purpose.TITLE
    assert purpose_of_prompt([Message(Role.SYSTEM, words)]) is None


def test_a_message_of_very_many_lines_is_searched_without_splitting_it() -> None:
    lines = "\n" * 1_000_000
    prompts = [
        [Message(Role.USER, text)] for text in (lines, lines + "Your task is to create a detailed summary of all.")
    ]
    tracemalloc.start()
    try:
        purposes = [purpose_of_prompt(prompt) for prompt in prompts]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert purposes == [None, Purpose.SUMMARY]
    assert peak < 3 * len(lines), "besides the text in lower case there was a list of its lines"


def test_notes_of_the_system_may_follow_the_prompt_for_a_summary() -> None:
    asked, note = (
        Message(Role.USER, "Your task is to create a detailed summary of the conversation so far."),
        Message(Role.SYSTEM, "n"),
    )
    assert purpose_of_prompt([asked, note]) is Purpose.SUMMARY
    assert purpose_of_prompt([asked, note, Message(Role.TOOL, "x", tool_call_id="c")]) is None
    assert purpose_of_prompt([note]) is None
