"""Histories as agents really send them back, with renamed calls or rewritten text, give the expected tree."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.create import model_folder
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, Script, play
from proxy.rendering.renderer import load_renderer
from proxy.rendering.templates.message_dicts import to_dicts
from proxy.settings import Settings
from proxy.trajectory.matching import canonical_arguments
from proxy.types import Message, Role, ToolCall
from tests.support import (
    Server,
    assistant,
    call_text,
    function_tool,
    sampled,
    says,
    serving,
    tiny_renderer,
    tool_result,
    user,
)

ADD = [function_tool("add", {"a": {"type": "integer"}})]
TWO_CALLS = call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": 2}')


def renamed(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    """An echo of the answer with other call ids."""
    echo = copy.deepcopy(answer)
    for call, name in zip(echo["tool_calls"], names, strict=True):
        call["id"] = name
    return echo


async def parents(server: Server) -> list[tuple[str, int | None, bool]]:
    """The reason, parent index and alignment of every interaction."""
    tree = await server.tree()
    order = {node["id"]: index for index, node in enumerate(tree)}
    return [(node["reason"], order.get(node["parent_id"]), node["aligned"]) for node in tree]


async def renaming_agent(server: Server) -> list[Any]:
    """Run a tool loop whose client renames the calls; return the history after it."""
    answer = await server.answer([user("add")], tools=ADD)
    history = [user("add"), renamed(answer, "x1", "x2"), tool_result("x1", "1"), tool_result("x2", "2")]
    return [*history, await server.answer(history, tools=ADD)]


async def test_a_session_with_renamed_calls_continues_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, says(TWO_CALLS, "three")) as server:
        history = await renaming_agent(server)
    async with serving(tmp_path, says("more")) as server:
        await server.answer([*history, user("go on")], tools=ADD)
        assert await parents(server) == [("first", None, False), ("continued", 0, True), ("continued", 1, True)]
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == sum(len(sampled(text)) for text in (TWO_CALLS, "three", "more"))


async def test_a_response_continues_by_id_after_renamed_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, says(TWO_CALLS, "three", "more")) as server:
        await renaming_agent(server)
        last = (await server.tree())[-1]["id"]
        tools = [{"type": "function", **ADD[0]["function"]}]
        body = {"model": "m", "input": "go on", "previous_response_id": last, "tools": tools}
        await server.ok("/s/v1/responses", body)
        assert (await parents(server))[-1] == ("continued", 1, True)


async def test_a_late_result_for_a_renamed_call_is_the_same_before_and_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, says(TWO_CALLS, "waiting", "all done")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        history = [user("add"), renamed(answer, "x1", "x2"), tool_result("x1", "1")]
        history += [await server.answer(history, tools=ADD), tool_result("x2", "2")]
        history += [await server.answer(history, tools=ADD), user("thanks")]
    async with serving(tmp_path, says("bye")) as server:
        history[1] = renamed(history[1], "y1", "y2")
        history[2], history[4] = tool_result("y1", "1"), tool_result("y2", "2")
        await server.answer(history, tools=ADD)
        assert [parent for _, parent, _ in await parents(server)] == [None, 0, 1, 2]


@pytest.mark.parametrize(
    ("sampled_arguments", "echoed"),
    [
        ('{"a": 1234567890123456789}', '{"a":1234567890123456800}'),  # JSON.stringify(JSON.parse(...))
        ('{"a": 123456789012345678901234567890}', '{"a":1.2345678901234568e+29}'),
        ('{"a": 1e21, "b": -0.0}', '{"b":0,"a":1e+21}'),
        ('{"a": "\\ud83d", "b": 1}', '{"a":"\\ud83d","b":1}'),
        ('{"a": "\\u00e9\\/"}', '{"a":"é/"}'),
    ],
)
async def test_arguments_that_a_client_parsed_and_serialised_are_the_same_node(
    tmp_path: Path, sampled_arguments: str, echoed: str
) -> None:
    async with serving(tmp_path, says(call_text("add", sampled_arguments), "ok")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        answer["tool_calls"][0]["function"]["arguments"] = echoed
        await server.answer([user("add"), answer, tool_result(answer["tool_calls"][0]["id"], "1")], tools=ADD)
        assert (await parents(server))[1] == ("continued", 0, True)


async def test_arguments_that_lost_a_repeated_key_are_another_history(tmp_path: Path) -> None:
    async with serving(tmp_path, says(call_text("add", '{"a": 1, "a": 2}'), "ok", "ok")) as server:
        answer = await server.answer([user("add")], tools=ADD)
        result = tool_result(answer["tool_calls"][0]["id"], "1")
        await server.answer([user("add"), answer, result], tools=ADD)
        answer["tool_calls"][0]["function"]["arguments"] = '{"a":2}'
        await server.answer([user("add"), answer, result], tools=ADD)
        assert (await parents(server))[1:] == [("continued", 0, True), ("rewritten", None, False)]


def test_integers_that_differ_as_doubles_are_different_arguments() -> None:
    assert canonical_arguments('{"a": 9007199254740991}') != canonical_arguments('{"a": 9007199254740992}')
    assert canonical_arguments('{"a": 1234567890123456789}') != canonical_arguments('{"a": 1234567890123457789}')


async def test_a_lone_surrogate_in_a_foreign_call_is_context_and_no_failure(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":"\\ud83d!","\\uDC00":1}'}}
    async with serving(tmp_path, says("ok")) as server:
        await server.answer([user("q"), assistant(None, tool_calls=[call]), tool_result("c", "1")], tools=ADD)
        assert '{"a": "\ufffd!", "\ufffd": 1}' in tiny_renderer().decode(server.prompts()[0])


@pytest.mark.parametrize("arguments", ["", "  "])
def test_empty_arguments_of_every_form_are_an_empty_object(arguments: str) -> None:
    (written,) = to_dicts([Message(Role.ASSISTANT, "", (ToolCall("c", "add", arguments),))])
    assert written["tool_calls"][0]["function"]["arguments"] == {}


@contextlib.asynccontextmanager
async def forgetting(folder: Path, script: Script) -> AsyncIterator[Server]:
    """A server whose template removes the reasoning of earlier turns."""
    settings = Settings(database_url=f"sqlite:///{folder / 'test.db'}", thinking_retention="template")
    renderer = load_renderer(settings, model_folder(settings))
    engine = ScriptedEngine(script, vocab_size=renderer.vocab_size)
    app = build_app(settings, engine=engine, renderer=renderer)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield Server(app, http, engine)


async def test_drift_mask_finds_an_output_after_its_own_question(tmp_path: Path) -> None:
    """Without its reasoning, the second answer in the prompt looks like the third one."""
    texts = ["yes", "<think>\nhm\n</think>\n\nyes", "yes", "<think>\nso\n</think>\n\nyes", "no"]
    async with forgetting(tmp_path, says(*texts)) as server:
        history: list[Any] = []
        for index in range(len(texts)):
            history.append(user(f"question {index}"))
            history.append(await server.answer(history))
        assert {node["reason"] for node in (await server.tree())[1:]} == {"template"}
        (sample,) = await server.export(drift="mask")
        asked = [asked_before(sample["input_ids"], turn["span"]) for turn in sample["turns"]]
        assert asked == ["0", None, "2", None, "4"]


def asked_before(ids: list[int], span: list[int] | None) -> str | None:
    """The number of the question right before an output; None if `ids` do not contain the output."""
    return tiny_renderer().decode(ids[: span[0]]).rpartition("question ")[2][0] if span else None


async def test_a_truncated_call_is_the_same_node_as_its_repaired_echo(tmp_path: Path) -> None:
    """Coding agents repair truncated arguments and send them back."""
    cut = sampled('<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "so fa', end=False)
    tool = function_tool("add", {"a": {"type": "integer"}, "note": {"type": "string"}})
    async with serving(tmp_path, play([Reply(cut), Reply(sampled("ok"))])) as server:
        answer = await server.answer([user("q")], tools=[tool])
        (call,) = answer["tool_calls"]
        echo = {**call, "function": {"name": "add", "arguments": '{"note":"so fa","a":1}'}}
        history = [user("q"), assistant(None, tool_calls=[echo]), tool_result(call["id"], "bad arguments")]
        await server.answer(history, tools=[tool])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_an_answer_with_a_line_break_added_is_the_same_node(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.answer([user("q")])
        await server.answer([user("q"), assistant(" one\n"), user("more")])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_an_answer_split_into_assistant_messages_is_one_over_messages(tmp_path: Path) -> None:
    tool = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    text = "<think>\nhm\n</think>\n\nwell\n" + call_text("add", '{"a": 1}')
    async with serving(tmp_path, says(text, "two")) as server:
        body = {"model": "m", "max_tokens": 99, "tools": [tool], "messages": [user("q")]}
        reply = await server.ok("/s/v1/messages", body)
        split = [{"role": "assistant", "content": [block]} for block in reply["content"]]
        result = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": "1"}
        history = [user("q"), *split, {"role": "user", "content": [result]}]
        await server.ok("/s/v1/messages", {**body, "messages": history})
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_an_answer_with_its_reasoning_moved_into_the_text_is_the_same_node(tmp_path: Path) -> None:
    text = "<think>\nhm\n</think>\n\none"
    async with serving(tmp_path, says(text, "two")) as server:
        await server.answer([user("q")])
        await server.answer([user("q"), assistant("<think>\nhm\n</think>\none"), user("more")])
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]
        seen = server.prompts()[0] + list(sampled(text))
        assert server.prompts()[1][: len(seen)] == seen
