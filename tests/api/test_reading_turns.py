"""GET /rl/sessions/{session}/interactions/{turn}: what was stored of a turn, and why it forked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.support import Server, assistant, call_text, function_tool, sampled, says, serving, system, tool_result, user

ADD = [function_tool("add", {"a": {"type": "integer"}})]
HEAD = [system("Be brief."), user("one")]


async def read(server: Server, turn: str | int, *include: str, session: str = "s") -> Any:
    """Return a turn with the parts `include`."""
    query = {"include": ",".join(include)} if include else {}
    response = await server.http.get(f"/rl/sessions/{session}/interactions/{turn}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def forked(server: Server) -> list[Any]:
    """Two turns, then one that rewrites the first answer; return the messages of the last."""
    first = await server.answer(HEAD)
    second = await server.answer([*HEAD, first, user("two")])
    rewritten = [*HEAD, assistant("a better answer"), user("two"), second, user("three")]
    await server.answer(rewritten)
    return rewritten


@pytest.fixture
async def session(tmp_path: Path, database_url: str) -> Any:
    """A server, on each kind of database, with a session that forked."""
    async with serving(tmp_path, says("an answer", "more", "other"), database_url=database_url) as server:
        server.app.state.sent = await forked(server)
        yield server


async def test_a_turn_without_parts_is_its_entry_in_the_tree(session: Server) -> None:
    nodes = await session.tree()
    for number, node in enumerate(nodes):
        shown = await read(session, node["id"])
        assert {name: shown[name] for name in node} == node
        assert shown == await read(session, number)
        assert (shown["session_id"], shown["model"]) == ("s", "m")
        assert not {"messages", "prompt_ids", "logprobs", "reply", "times", "compared"} & shown.keys()


async def test_the_messages_are_those_of_the_whole_conversation(session: Server) -> None:
    shown = await read(session, 2, "messages")
    assert shown["messages"] == [{"role": m["role"], "content": m["content"]} for m in session.app.state.sent]
    assert shown["output"] == {"role": "assistant", "content": "other"}
    assert (shown["tools"], shown["sampling"]["temperature"]) == ([], 1.0)
    continued = await read(session, 1, "messages")
    assert [message["content"] for message in continued["messages"]] == ["Be brief.", "one", "an answer", "two"]


async def test_ids_and_logprobs_are_those_of_the_engine(session: Server) -> None:
    for number, prompt in enumerate(session.prompts()):
        shown = await read(session, number, "ids", "logprobs")
        assert shown["prompt_ids"] == prompt
        assert shown["output_ids"] == sampled(["an answer", "more", "other"][number]).tolist()
        assert len(shown["logprobs"]) == len(shown["output_ids"]) == sum(count for count, _ in shown["versions"])
        assert shown["unmasked_logprobs"] is None


async def test_times_are_in_order(session: Server) -> None:
    times = (await read(session, 1, "times"))["times"]
    assert times["created_at"] <= times["first_token_at"] <= times["completed_at"]


async def test_a_fork_names_the_nearest_turn_and_shows_both_sides(session: Server) -> None:
    ids = [node["id"] for node in await session.tree()]
    compared = (await read(session, 2, "compared"))["compared"]
    assert compared == {
        "continued": None,
        "nearest": {"interaction_id": ids[1], "turn": 1},
        "why": "content",
        "message": {
            "index": 2,
            "role": "assistant",
            "why": "content",
            "count": 1,
            "of": {"interaction_id": ids[0], "turn": 0},
            "sent": {"role": "assistant", "text": "a better answer"},
            "recorded": {"role": "assistant", "text": "an answer"},
        },
        "tools": None,
        "template_options": None,
        "token": None,
    }
    went_on = (await read(session, 1, "compared"))["compared"]
    assert went_on.pop("continued") == {"interaction_id": ids[0], "turn": 0}
    assert set(went_on.values()) == {None}


async def test_an_ended_session_reads_the_same_also_after_a_restart(tmp_path: Path, database_url: str) -> None:
    parts = ("messages", "ids", "logprobs", "times", "compared")
    async with serving(tmp_path, says("an answer", "more", "other"), database_url=database_url) as server:
        await forked(server)
        live = [await read(server, turn, *parts) for turn in range(3)]
        await server.ok("/s/rl/end_session", {})
        assert [await read(server, turn, *parts) for turn in range(3)] == live
    async with serving(tmp_path, says(), database_url=database_url) as server:
        assert [await read(server, turn, *parts) for turn in range(3)] == live


async def test_long_messages_are_shortened_to_where_they_differ(tmp_path: Path) -> None:
    async with serving(tmp_path, says("x" * 300, "b")) as server:
        first = await server.answer(HEAD)
        await server.answer([*HEAD, assistant(first["content"] + "y" * 300), user("go on")])
        message = (await read(server, 1, "compared"))["compared"]["message"]
        assert message["recorded"]["text"] == "…" + "x" * 40
        assert message["sent"]["text"] == "…" + "x" * 40 + "y" * 160 + "…"


async def test_an_edited_call_and_changed_tools_are_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, says(call_text("add", '{"a": 1}'), "b", "c")) as server:
        first = await server.answer(HEAD, tools=ADD)
        (call,) = first["tool_calls"]
        edited = {**call, "function": {"name": "add", "arguments": '{"a": 2}'}}
        await server.answer([*HEAD, assistant(None, tool_calls=[edited]), tool_result(call["id"], "2")], tools=ADD)
        message = (await read(server, 1, "compared"))["compared"]["message"]
        assert (message["why"], message["sent"]["text"]) == ("tool_calls", 'add({"a": 2})')
        assert message["recorded"]["text"] == 'add({"a": 1})'
        await server.answer(HEAD, tools=[*ADD, function_tool("sub")])
        compared = (await read(server, 2, "compared"))["compared"]
        assert (compared["why"], compared["tools"]) == ("tools", {"added": ["sub"], "removed": [], "changed": []})


@pytest.mark.parametrize(
    ("path", "status", "param", "said"),
    [
        ("0?include=message", 400, "include", "messages, added, ids, logprobs, request, reply, times, compared"),
        ("0?includes=ids", 400, "includes", "did you mean 'include'?"),
        ("9", 404, "interaction_id", "there is no turn '9'"),
        ("chatcmpl-0", 404, "interaction_id", "there is no turn 'chatcmpl-0'"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, path: str, status: int, param: str, said: str
) -> None:
    async with serving(tmp_path, says("a")) as server:
        await server.answer(HEAD)
        response = await server.http.get(f"/rl/sessions/s/interactions/{path}")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param)
        assert said in error["message"]
        assert (await server.http.get("/rl/sessions/none/interactions/0")).status_code == 404


CALL = call_text("add", '{"a": 1}')
THOUGHT = "<think>\nhm\n</think>\n\nan answer"
NAMESPACED = {"type": "function", **ADD[0]["function"]}
BODIES = {
    "chat": ("chat/completions", {"messages": HEAD}),
    "chat with everything": (
        "chat/completions",
        {"messages": HEAD, "n": 2, "logprobs": True, "return_token_ids": True, "tools": ADD, "stop": "never"},
    ),
    "a call that may not be made": ("chat/completions", {"messages": HEAD, "tools": ADD, "tool_choice": "none"}),
    "chat without a model": ("chat/completions", {"messages": HEAD, "model": None, "min_tokens": 1}),
    "chat with a format": ("chat/completions", {"messages": HEAD, "response_format": {"type": "json_object"}}),
    "messages": ("messages", {"max_tokens": 50, "system": "Be brief.", "messages": [user("one")]}),
    "messages with a prefill": ("messages", {"max_tokens": 50, "messages": [user("one"), assistant("Sure:")]}),
    "responses": ("responses", {"input": "one"}),
    "responses in a namespace": (
        "responses",
        {"input": "one", "tools": [{"type": "namespace", "name": "math", "tools": [NAMESPACED]}]},
    ),
    "responses with allowed tools": (
        "responses",
        {
            **{"input": "one", "tools": [NAMESPACED], "max_output_tokens": 60},
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        },
    ),
    "responses with everything": (
        "responses",
        {
            **{"input": "one", "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "top_logprobs": 0},
            **{"tools": [{"type": "function", **ADD[0]["function"], "strict": True}], "parallel_tool_calls": False},
            **{"include": ["reasoning.encrypted_content", "message.output_text.logprobs"], "store": False},
            **{"text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"summary": "auto"}},
        },
    ),
    "completions": ("completions", {"prompt": "one", "logprobs": 1, "n": 2}),
    "generate": ("generate", {"input_ids": [1, 2, 3], "sampling_params": {"stop_token_ids": [5, 6]}}),
}


@pytest.mark.parametrize("answer", [THOUGHT, CALL], ids=["text", "call"])
async def test_the_reply_is_what_the_client_got_also_after_a_restart(tmp_path: Path, answer: str) -> None:
    got: list[tuple[str, Any]] = []
    async with serving(tmp_path, lambda _: Reply(sampled(answer))) as server:
        for number, (path, body) in enumerate(BODIES.values()):
            session = str(number)
            got.append((session, await server.ok(f"/{session}/v1/{path}", {"model": "m", **body})))
            if path == "responses":
                more = {"input": "two", "previous_response_id": got[-1][1]["id"], "instructions": "Be long."}
                got.append((session, await server.ok(f"/{session}/v1/{path}", {"model": "m", **body, **more})))
        for session, reply in got:
            assert (await read(server, reply["id"], "reply", session=session))["reply"] == reply
    async with serving(tmp_path, says()) as server:
        for session, reply in got:
            assert (await read(server, reply["id"], "reply", session=session))["reply"] == reply


async def test_a_second_choice_shows_the_whole_reply_and_a_stream_its_whole_body(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b", "c")) as server:
        reply = await server.chat(HEAD, n=2)
        assert (await read(server, 1, "reply"))["reply"] == reply
        await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")], "stream": True})
        streamed = (await read(server, 2, "reply"))["reply"]
        assert (streamed["object"], streamed["choices"][0]["message"]["content"]) == ("chat.completion", "c")


async def test_a_turn_that_failed_has_no_reply(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("a"), fault=Fault.ERROR)])) as server:
        assert (await server.post("/s/v1/chat/completions", {"model": "m", "messages": HEAD})).status_code == 502
        (node,) = await server.tree()
        shown = await read(server, node["id"], "reply", "messages", "compared")
        assert (shown["reply"], shown["turn"], shown["status"]) == (None, None, "failed")
        assert [message["content"] for message in shown["messages"]] == ["Be brief.", "one"]
        assert set(shown["compared"].values()) == {None}


async def test_instructions_are_stored_once(tmp_path: Path) -> None:
    """An agent sends the same long instructions with every turn."""
    async with serving(tmp_path, says("a")) as server:
        long = "Be brief. " * 50
        reply = await server.ok("/s/v1/responses", {"model": "m", "input": "one", "instructions": long})
        (stored,) = await server.app.state.store.recordings.load_interactions("s")
        assert stored.asked["echo"]["instructions"] is True
        assert (await read(server, 0, "reply"))["reply"]["instructions"] == long == reply["instructions"]


async def test_a_session_shows_the_comparisons_of_all_turns_at_once(session: Server) -> None:
    shown = (await session.http.get("/rl/sessions/s?include=compared")).json()["interactions"]
    for number, node in enumerate(shown):
        assert node["compared"] == (await read(session, number, "compared"))["compared"]
    refused = await session.http.get("/rl/sessions/s?include=messages")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")
    assert (await session.http.get("/rl/sessions/s?includes=compared")).status_code == 400


async def test_a_session_whose_id_is_a_path_is_read_too(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        reply = await server.chat(HEAD, "a/b")
        assert (await read(server, reply["id"], "reply", session="a/b"))["reply"] == reply


async def test_a_template_that_rewrites_history_shows_the_first_tokens_that_differ(tmp_path: Path) -> None:
    async with serving(tmp_path, says(THOUGHT, "b"), thinking_retention="template") as server:
        first = await server.answer(HEAD)
        await server.answer([*HEAD, first, user("two")])
        compared = (await read(server, 1, "compared"))["compared"]
        token = compared["token"]
        assert (compared["why"], compared["continued"]) == ("tokens", compared["nearest"])
        assert token["recorded_text"].startswith("<think>\nhm") and token["sent_text"].startswith("an answer")
        shown, recorded = await read(server, 1, "ids"), await read(server, 0, "ids")
        at = token["index"]
        assert token["sent"] == shown["prompt_ids"][at : at + 8]
        assert token["recorded"] == [*recorded["prompt_ids"], *recorded["output_ids"]][at : at + 8]


async def test_a_session_shows_the_parts_of_all_its_turns_at_once(session: Server) -> None:
    parts = ("logprobs", "reply", "times")
    shown = (await session.http.get(f"/rl/sessions/s?include={','.join(parts)}")).json()["interactions"]
    assert len(shown) == 3
    for node in shown:
        alone = await read(session, node["id"], *parts)
        assert {name: alone[name] for name in node} == node
        assert node["reply"]["id"] == node["id"]
    refused = await session.http.get("/rl/sessions/s?include=messages")
    assert refused.status_code == 400
    assert "logprobs, reply, times, compared" in refused.json()["error"]["message"]
