"""A restart in the middle of a session changes neither its tree, its tokens nor its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import Server, assistant, call_text, function_tool, says, serving, tool_result, user

TOOLS = [function_tool("add", {"a": {"type": "integer"}})]
SCRIPT = ("<think>\nwhy\n</think>\n\n" + call_text("add", '{"a": 1}'), "two", "three", "four", "five")


async def first_half(server: Server) -> list[Any]:
    messages: list[Any] = [user("q")]
    call = await server.answer(messages, tools=TOOLS)
    messages += [call, tool_result(call["tool_calls"][0]["id"], "1")]
    messages += [await server.answer(messages, tools=TOOLS)]
    return messages


async def second_half(server: Server, messages: list[Any]) -> None:
    await server.answer([*messages, user("a")], tools=TOOLS)
    await server.answer([*messages, user("b")], tools=TOOLS)
    await server.answer([*messages[:-1], assistant("edited"), user("c")], tools=TOOLS)


def shape(tree: list[Any]) -> list[Any]:
    order = {node["id"]: node["seq"] for node in tree}
    keys = ("seq", "aligned", "reason", "status", "prompt_tokens", "output_tokens")
    return [(order.get(node["parent_id"]), *(node[key] for key in keys)) for node in tree]


async def test_a_session_continues_after_a_restart_as_without_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    async with serving(tmp_path / "whole", says(*SCRIPT)) as server:
        await second_half(server, await first_half(server))
        whole, wanted = shape(await server.tree()), server.prompts()
        samples = [sample["input_ids"] for sample in await server.export()]
    async with serving(tmp_path / "halves", says(*SCRIPT[:2])) as server:
        messages = await first_half(server)
        given = server.prompts()
    async with serving(tmp_path / "halves", says(*SCRIPT[2:])) as server:
        await second_half(server, messages)
        assert shape(await server.tree()) == whole
        assert given + server.prompts() == wanted
        assert [sample["input_ids"] for sample in await server.export()] == samples


async def test_rewards_end_and_returns_survive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        answer = await server.answer([user("q")])
        await server.answer([user("q"), answer, user("more")])
        await server.ok("/s/rl/set_reward", {"reward": 2.0})
        await server.ok("/s/rl/end_session", {"outcome": "Finished", "metrics": {"m": 1}})
        before = await server.tree()
    async with serving(tmp_path, says()) as server:
        assert await server.tree() == before
        response = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("q")]})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "session_closed")
