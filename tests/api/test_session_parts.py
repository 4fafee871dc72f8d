"""GET /rl/sessions/{session}?include=answer,running,score: what somebody who looks at a session needs at a glance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.support import Server, call_text, function_tool, sampled, says, serving, until, user

ADD = [function_tool("add", {"a": {"type": "integer"}})]


async def shown(server: Server, include: str) -> Any:
    """Return the session with the parts `include`."""
    response = await server.http.get("/rl/sessions/s", params={"include": include})
    assert response.status_code == 200, response.text
    return response.json()


async def test_answers_are_one_line_and_short_and_calls_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one\n\n  two", call_text("add", '{"a": 1}'), "x" * 500)) as server:
        for text in "abc":
            await server.chat([user(text)], tools=ADD)
        answers = [node["answer"] for node in (await shown(server, "answer"))["interactions"]]
        one = (await server.http.get("/rl/sessions/s/interactions/0", params={"include": "answer"})).json()
    assert answers[0] == {"text": "one two", "calls": []} == one["answer"]
    assert answers[1] == {"text": "", "calls": ["add"]}
    assert answers[2] == {"text": "x" * 160, "calls": []}


async def test_an_answer_is_as_long_as_may_be_when_its_white_space_is_joined(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a" + " " * 400 + "b")) as server:
        await server.chat([user("hi")])
        [node] = (await shown(server, "answer"))["interactions"]
    assert node["answer"]["text"] == "a b"


async def test_a_turn_says_how_many_messages_its_parent_had_and_a_root_alone_has_its_tools(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        first = await server.answer([user("hi")], tools=ADD)
        await server.answer([user("hi"), first, user("more")], tools=ADD)
        turns = [
            (
                await server.http.get(f"/rl/sessions/s/interactions/{number}", params={"include": "messages,added"})
            ).json()
            for number in range(2)
        ]
    assert [(turn["inherited"], len(turn["messages"])) for turn in turns] == [(0, 1), (2, 3)]
    for turn in turns:
        assert turn["messages"][turn["inherited"] :] == turn["added"]["messages"]
    assert [turn["added"]["tools"] for turn in turns] == [turns[0]["tools"], None]
    assert [turn["added"]["template_options"] for turn in turns] == [turns[0]["template_options"], None]


async def test_a_running_turn_names_its_parent_and_counts_its_tokens(tmp_path: Path) -> None:
    hangs = Reply(sampled("never ends"), fault=Fault.HANG, fault_after=2)
    async with serving(tmp_path, play([Reply(sampled("hello")), hangs])) as server:
        first = await server.answer([user("hi")])
        asked = asyncio.create_task(server.chat([user("hi"), first, user("more")]))
        turns = server.app.state.registry.sessions()[0]
        await until(lambda: turns.running == 1)
        tree = await shown(server, "running")
        while tree["running"][0]["output_tokens"] != 2:
            tree = await shown(server, "running")
        [node], [running] = tree["interactions"], tree["running"]
        assert tree["begun_not_ended"] == 1
        assert (running["parent_id"], running["here"], running["api"]) == (node["id"], True, "chat")
        assert running["prompt_tokens"] > node["prompt_tokens"]
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_a_call_that_runs_elsewhere_has_an_id_and_a_begin_only(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.chat([user("hi")])
        registry = server.app.state.registry

        async def begun(session_id: str) -> dict[str, float]:
            return {"chatcmpl-elsewhere": 12.5}

        registry.load_begun = begun
        tree = await shown(server, "running")
    [running] = tree["running"]
    assert (running["interaction_id"], running["begun_at"], running["here"]) == ("chatcmpl-elsewhere", 12.5, False)
    assert running["parent_id"] is running["prompt_tokens"] is running["output_tokens"] is None


async def test_the_score_is_that_of_an_export_and_says_what_leaves_it_out(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.chat([user("hi")])
        tree = await shown(server, "score")
        assert (tree["score"], tree["left_out"]) == (None, "active")
        await server.ok("/s/rl/set_reward", {"reward": 0.5})
        await server.ok("/s/rl/end_session", {})
        tree = await shown(server, "score,answer")
    assert (tree["score"], tree["left_out"]) == (0.5, None)


@pytest.mark.parametrize("part", ["running", "score"])
async def test_parts_of_a_session_are_none_of_a_turn(tmp_path: Path, part: str) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.chat([user("hi")])
        refused = await server.http.get("/rl/sessions/s/interactions/0", params={"include": part})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")
