"""A loop that keeps the token ids itself gets the very prompts of a session, and the very messages of its answers.

For every published template: `/v1/tokenize` with `continue_from` appends what the next turn of a chat session appends,
and `/v1/parse` reads what the session's answer was. Neither call knows the session.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering import Renderer, load_renderer
from proxy.rendering.written_answers import write_answer
from proxy.settings import Settings
from proxy.types import Ids, Message, Role, Tool, ToolCall
from tests.support import Server, function_tool, serving, tool_result, user
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tests.wide import CROSSED
from tokengrove.errors import InvalidRequest

TOOLS = [function_tool("read", {"path": {"type": "string"}})]
TOOL = Tool("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
FOLLOW_UPS = {
    "user": [user("Again?")],
    "users": [user("One."), user("Two?")],
    "system": [{"role": "system", "content": "Be brief."}, user("Again?")],
    "nothing": [],
}

REFUSED = {
    *((name, "users") for name in ("cohere2", "gemma3")),
    *((name, "system") for name in ("deepseekv3", "gemma3", "gptoss", "qwen3_5_think", "qwen3_8")),
}
"""What a template cannot express, or only by a change of what stands before it."""


def written(renderer: Renderer, answer: Message, tools: tuple[Tool, ...]) -> Ids:
    return write_answer(renderer, (Message(Role.USER, "Hi"),), answer, tools, {})


def calling(renderer: Renderer, calls: int) -> Ids | None:
    """An answer with calls as the model samples it; None if its template writes none."""
    asked = tuple(ToolCall(f"call{n:05}", "read", f'{{"path": "{n}"}}') for n in range(calls))
    try:
        return written(renderer, Message(Role.ASSISTANT, "", asked), (TOOL,))
    except InvalidRequest:
        return None


async def compare(server: Server, session: str, follow_ups: list[list[Any]], tools: list[Any]) -> int:
    """Run a session, and beside it a loop over token ids. Return how many prompts could be continued and were equal."""
    messages: list[Any] = [user("Hi")]
    more = {"tools": tools} if tools else {}
    known: dict[str, Any] = {}
    equal = 0
    for follow_up in [*follow_ups, []]:
        path = f"/{session}/v1/chat/completions"
        response = await server.post(path, {"messages": messages, "return_token_ids": True, **more})
        if known:
            told = await server.post("/v1/tokenize", {"messages": messages, "continue_from": known, **more})
            if response.status_code != 200:
                assert (told.status_code, told.json()) == (response.status_code, response.json())
                break
            # A session renders in full where the template rewrites its history: there the loop is told so.
            node = (await server.tree(session))[-1]
            assert (told.status_code == 200) == (node["reason"] == "continued"), (told.text, node["reason"])
            if told.status_code == 200:
                assert told.json()["tokens"] == response.json()["prompt_token_ids"]
                equal += 1
        reply = response.json()
        prompt, choice = reply["prompt_token_ids"], reply["choices"][0]
        read = await server.ok("/v1/parse", {"tokens": choice["token_ids"], "prompt_ids": prompt[-64:], **more})
        assert without_ids(read["message"]) == without_ids(choice["message"])
        assert read["finish_reason"] == choice["finish_reason"]
        results = [tool_result(call["id"], "ok") for call in choice["message"].get("tool_calls") or []]
        messages = [*messages, choice["message"]]
        ids = [*prompt, *choice["token_ids"]]
        known = {"messages": len(messages), "token_ids": ids, "output_tokens": len(choice["token_ids"])}
        messages += [*results, *follow_up]
    return equal


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls}


def loaded(published: Callable[[str], Path], name: str) -> Renderer:
    return load_renderer(Settings(), published(name))


@CROSSED
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("end", ["ended", "cut"])
async def test_known_ids_go_on_as_a_session_does(
    published: Callable[[str], Path], tmp_path: Path, name: str, end: str
) -> None:
    renderer = loaded(published, name)
    whole = written(renderer, Message(Role.ASSISTANT, "Yo there."), ())
    output = whole if end == "ended" else whole[:-1]
    async with serving(tmp_path, lambda request: Reply(output), renderer) as server:
        for kind, follow_up in FOLLOW_UPS.items():
            equal = await compare(server, kind, [follow_up], [])
            assert equal == ((name, kind) not in REFUSED), kind


@CROSSED
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("calls", [1, 2])
async def test_tool_results_are_appended_as_a_session_does(
    published: Callable[[str], Path], tmp_path: Path, name: str, calls: int
) -> None:
    renderer = loaded(published, name)
    output = calling(renderer, calls)
    if output is None:
        pytest.skip("the template writes no such calls")
    answer = written(renderer, Message(Role.ASSISTANT, "Done."), (TOOL,))
    script = play([Reply(output), Reply(output), Reply(answer), Reply(answer)])
    async with serving(tmp_path, script, renderer) as server:
        equal = await compare(server, "s", [[], [], [user("More?")]], TOOLS)
    assert equal == 3
