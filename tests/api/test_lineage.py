"""A compaction and a sub-agent over HTTP: the links that turns note, and what exports make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Script
from tests.exports import entries
from tests.support import Server, call_text, function_tool, says, serving, system, user
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest

SUMMARY = "1. The user wants big.txt read. 2. Half of it is done."
PROMPT = "Read notes.txt and say the secret word."
ASK = user("Your task is to create a detailed summary of the conversation so far.")
TOOLS = [function_tool("task", {"prompt": {"type": "string"}})]


def script() -> Script:
    call = call_text("task", f'{{"prompt": "{PROMPT}"}}')
    return says(call, "plum", "I go on.", SUMMARY, "I go on here.", "Done.")


async def played(server: Server, **options: Any) -> list[Any]:
    """A turn that calls, the sub-agent's, the turn that goes on, a summary, and two turns after it, rewarded."""
    await server.ok("/rl/start_session", {"session_id": "s", **options})
    talk = [system("You are an agent."), user("Read big.txt.")]
    called = await server.answer(talk, tools=TOOLS)
    await server.answer([system("You are a sub-agent."), user(PROMPT)], tools=TOOLS)
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "plum"}
    talk += [called, result]
    talk.append(await server.answer(talk, tools=TOOLS))
    await server.answer([*talk, ASK], tools=TOOLS)
    after = [system("You are an agent."), user(f"The conversation so far:\n{SUMMARY}\nContinue.")]
    after.append(await server.answer(after, tools=TOOLS))
    await server.answer([*after, user("Go on.")], tools=TOOLS)
    await server.ok("/s/rl/set_reward", {"reward": 1.0})
    return await server.tree()


async def test_turns_note_where_their_conversation_came_from(tmp_path: Path) -> None:
    async with serving(tmp_path, script()) as server:
        turns = await played(server)
        names = [turn["interaction_id"] for turn in turns]
        found = {turn["turn"]: turn["notes"]["lineage"] for turn in turns if "lineage" in turn["notes"]}
        assert found == {
            1: {"from": [names[0]], "kind": "subagent", "evidence": "call"},
            4: {"from": [names[3]], "kind": "compaction", "evidence": "summary"},
        }
        entry = entries(await server.ok("/trajectories/export", {"session_id": "s"}))["s"]
        assert [(each["interaction_id"], each["first"]) for each in entry["lineage"]] == [
            (names[1], names[1]),
            (names[4], names[0]),
        ]
        server.forget_sessions()
        assert [turn["notes"] for turn in await server.tree()] == [turn["notes"] for turn in turns]


async def test_returns_and_path_scores_follow_the_lineage_if_asked(tmp_path: Path) -> None:
    async with serving(tmp_path, script()) as server, AsyncClient(app=server.app) as client:
        await played(server, credit="lineage")
        assert [turn["return"] for turn in await server.tree()] == [1.0] * 6
        await server.ok("/s/rl/end_session", {})
        alone = await client.export(session_id="s", credit="tree", reward_scope="path")
        assert sorted(sample.reward for sample in alone.samples) == [0.0, 0.0, 1.0]
        linked = await client.export(session_id="s", reward_scope="path")
        assert sorted(sample.reward for sample in linked.samples) == [0.0, 1.0, 1.0], "but for the sub-agent's"


async def test_conversations_are_selected_by_how_they_came_about(tmp_path: Path) -> None:
    async with serving(tmp_path, script()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        names = [turn["interaction_id"] for turn in await server.tree()]
        for kinds, last in ((["new"], {3}), (["compaction"], {5}), (["new", "subagent"], {1, 3})):
            found = await client.export(session_id="s", filter={"lineage": kinds})
            assert {names.index(sample.interaction_id) for sample in found.samples} == last
        newest = await client.export(session_id="s", train={"max_segments": 1})
        trained = {sample.interaction_id for sample in newest.samples if sample.loss_mask.any()}
        assert {names.index(each) for each in trained} == {1, 5}
        with pytest.raises(InvalidRequest, match="lineage"):
            await client.export(session_id="s", filter={"lineage": ["old"]})  # type: ignore[list-item]


async def test_threads_of_clients_link_what_no_text_does(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three", "four")) as server:
        path = "/s/v1/chat/completions"
        for text, headers in (
            ("first", {"thread-id": "a"}),
            ("other", {"thread-id": "a"}),
            ("child", {"thread-id": "b", "x-codex-parent-thread-id": "a"}),
            ("none", {}),
        ):
            body = {"model": "m", "messages": [user(text)], "tools": TOOLS}
            await server.ok(path, body, headers={"content-type": "application/json", **headers})
        turns = await server.tree()
        names = [turn["interaction_id"] for turn in turns]
        found = [turn["notes"].get("lineage") for turn in turns]
        assert found == [
            None,
            {"from": [names[0]], "kind": "reset", "evidence": "thread"},
            {"from": [names[1]], "kind": "subagent", "evidence": "thread"},
            None,
        ]
        assert turns[2]["notes"]["thread"] == {"id": "b", "parent": "a"}
