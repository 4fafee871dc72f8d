"""Minimal requests of real clients: their tool loops become one sample, and side calls get their purpose.

Captured from codex 0.169.0, claude-code 2.1.329, opencode 1.18.33, qwen-code 0.24.4 and pi 0.73.1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Reply, play
from tests.support import Server, assistant, call_text, function_tool, sampled, says, serving, system, tool_result, user

CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object", "properties": {}}},
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for agents.",
        "tools": [{"type": "function", "name": "spawn_agent", "parameters": {"type": "object", "properties": {}}}],
    },
    {"type": "web_search", "external_web_access": False},
]
CLAUDE_TOOLS: list[dict[str, Any]] = [
    {"name": "Bash", "description": "runs", "input_schema": {"type": "object", "properties": {}}},
    {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True},
]


def codex_message(role: str, text: str, item_id: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": item_id, "role": role, "content": [{"type": kind, "text": text}]}


def codex_body(items: list[Any], turn: int) -> dict[str, Any]:
    return {
        "model": "m",
        "stream": True,
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1fb74",
        "client_metadata": {"turn_id": f"turn-{turn}"},
    }


def codex_headers(kind: str = "turn", **more: str) -> dict[str, str]:
    return {"session-id": "01a1fb74", "x-codex-turn-metadata": json.dumps({"request_kind": kind}), **more}


def claude_body(messages: list[Any], turn: int) -> dict[str, Any]:
    return {
        "model": "claude-opus-5-5",
        "max_tokens": 64,
        "stream": True,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.329; cch={turn};"},
            {"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": json.dumps({"session_id": "faabf391"})},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def codex_turn(server: Server, items: list[Any], turn: int, headers: dict[str, str]) -> list[dict[str, Any]]:
    """The finished output items of a turn, as Codex collects them."""
    response = await server.post("/s/v1/responses", codex_body(items, turn), headers=headers)
    assert response.status_code == 200, response.text
    assert events(response.text)[-1]["type"] == "response.completed"
    return [event["item"] for event in events(response.text) if event["type"] == "response.output_item.done"]


async def claude_turn(server: Server, messages: list[Any], turn: int, **headers: str) -> list[dict[str, Any]]:
    """The content blocks of a turn, with tool inputs as Claude Code parses them."""
    path = "/s/v1/messages?beta=true"
    response = await server.post(path, claude_body(messages, turn), headers={"x-api-key": "k", **headers})
    assert response.status_code == 200, response.text
    blocks: list[dict[str, Any]] = []
    for event in events(response.text):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input_text": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for part, field in (("thinking",) * 2, ("signature",) * 2, ("text",) * 2, ("partial_json", "input_text")):
                if part in delta:
                    blocks[-1][field] += delta[part]
    return [_echoed(block) for block in blocks]


def _echoed(block: dict[str, Any]) -> dict[str, Any]:
    text = block.pop("input_text")
    if block["type"] == "tool_use":
        try:
            block["input"] = json.loads(text or "{}")
        except json.JSONDecodeError:
            block["input"] = {"__unparsedToolInput": {"raw": text, "len": len(text)}}
    return block


def claude_result(call: dict[str, Any], text: str) -> dict[str, Any]:
    result = {"tool_use_id": call["id"], "type": "tool_result", "content": text, "is_error": False}
    return {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]}


async def purposes(server: Server) -> list[str]:
    return [node["purpose"] for node in await server.tree()]


async def test_a_tool_loop_of_codex_is_one_sample(tmp_path: Path) -> None:
    first = "<think>\nlook first\n</think>\n\nLet me look." + call_text("exec_command", '{"cmd": "ls"}')
    both = call_text("exec_command", '{"cmd": "a"}') + "\n" + call_text("spawn_agent", '{"message": "b"}')
    async with serving(tmp_path, says(first, both, "done")) as server:
        items: list[Any] = [
            codex_message("developer", "You are Codex.", "msg_1"),
            codex_message("developer", "<skills_instructions>", "msg_2"),
            codex_message("user", "<environment_context>", "msg_3"),
            codex_message("user", "list the files", "msg_4"),
        ]
        for turn in range(3):
            answer = await codex_turn(server, items, turn, codex_headers())
            calls = [item for item in answer if item["type"] == "function_call"]
            results = [
                {"type": "function_call_output", "id": f"fco_{turn}{n}", "call_id": call["call_id"], "output": "ok"}
                for n, call in enumerate(calls)
            ]
            items += [*answer, *results]
        assert [call.get("namespace") for call in items if call["type"] == "function_call"] == [
            None,
            None,
            "multi_agent_v1",
        ]
        (sample,) = await server.export()
        assert len(sample["interaction_ids"]) == 3
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "continued"]


async def test_sub_agents_and_compactions_of_codex_are_recognised_by_headers(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abcde")) as server:
        sub = {"x-openai-subagent": "collab_spawn"}
        told = [codex_headers(), codex_headers(**sub), codex_headers("compaction"), codex_headers("compaction", **sub)]
        told.append({"x-codex-turn-metadata": "no json", "x-openai-subagent": "compact"})
        for turn, headers in enumerate(told):
            await codex_turn(server, [codex_message("user", f"hello {turn}", "msg_1")], turn, headers)
        assert await purposes(server) == ["main", "subagent", "summary", "summary", "summary"]


async def test_side_turns_of_openclaw_are_aux_and_main_turns_are_trained_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, says("Hello", "A greeting", "Bye")) as server:
        asked = [user("Hi")]
        for turn_type, said in (("main", asked), ("side", [user("Name this chat")]), ("Main", [*asked, user("Bye")])):
            headers = {"x-session-id": "claw", "x-turn-type": turn_type, "authorization": "Bearer one-key-for-all"}
            await server.ok("/v1/chat/completions", {"model": "m", "messages": said}, headers=headers)
        rewarded = await server.ok("/rl/set_reward", {"reward": 1.0}, headers={"x-session-id": "claw"})
        await server.ok("/rl/end_session", {}, headers={"x-session-id": "claw"})
        tree = await server.tree("claw")
        assert [node["purpose"] for node in tree] == ["main", "aux", "main"]
        assert rewarded["interaction_ids"] == [tree[2]["interaction_id"]]
        exported = await server.ok("/trajectories/export", {"session_id": "claw", "train": {"purposes": "main"}})
        trained = {name for each in exported["samples"] if any(each["loss_mask"]) for name in each["interaction_ids"]}
        assert trained == {tree[0]["interaction_id"], tree[2]["interaction_id"]}


async def test_a_tool_loop_of_claude_code_is_one_sample(tmp_path: Path) -> None:
    first = "<think>\nlook first\n</think>\n\nLet me look." + call_text("Bash", '{"command": "ls"}')
    both = call_text("Bash", '{"command": "a"}') + "\n" + call_text("Bash", '{"command": "b"}')
    async with serving(tmp_path, says(first, both, "done")) as server:
        reminder = {"type": "text", "text": "<system-reminder>git status</system-reminder>"}
        messages: list[Any] = [
            {"role": "user", "content": [reminder, {"type": "text", "text": "list the files"}]},
            {"role": "system", "content": [{"type": "text", "text": "skills", "cache_control": {"type": "ephemeral"}}]},
        ]
        for turn in range(3):
            blocks = await claude_turn(server, messages, turn)
            if turn == 0:  # the cache breakpoint moves on, and its old message becomes a plain string
                messages[1] = {"role": "system", "content": "skills"}
            results = [claude_result(block, "ok")["content"][0] for block in blocks if block["type"] == "tool_use"]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        (sample,) = await server.export()
        assert len(sample["interaction_ids"]) == 3
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "continued"]


async def test_arguments_that_claude_code_cannot_parse_match_when_echoed(tmp_path: Path) -> None:
    cut = sampled('<tool_call>\n{"name": "Bash", "arguments": {"command": "ca', end=False)
    async with serving(tmp_path, play([Reply(cut), Reply(sampled("done"))])) as server:
        messages: list[Any] = [{"role": "user", "content": "list the files"}]
        blocks = await claude_turn(server, messages, 0)
        assert "__unparsedToolInput" in blocks[0]["input"]
        messages += [{"role": "assistant", "content": blocks}, claude_result(blocks[0], "could not be parsed")]
        await claude_turn(server, messages, 1)
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_sub_agents_and_compactions_of_claude_code_are_recognised(tmp_path: Path) -> None:
    compaction = "CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of this conversation."
    async with serving(tmp_path, says(*"abc")) as server:
        await claude_turn(server, [user("work")], 0)
        await claude_turn(server, [user("look")], 1, **{"x-claude-code-agent-id": "a6c0c3de"})
        await claude_turn(server, [user("work"), assistant("a"), user(compaction)], 2)
        assert await purposes(server) == ["main", "subagent", "summary"]


async def test_titles_and_sub_agents_of_opencode_are_in_the_session_of_the_agent(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abcd")) as server:

        async def turn(messages: list[Any], session: str, parent: str | None = None, **more: Any) -> None:
            headers = {"x-session-affinity": session, "x-session-id": session}
            headers |= {"x-parent-session-id": parent} if parent else {}
            body = {"model": "m", "max_tokens": 64, "messages": messages, **more}
            await server.ok("/v1/chat/completions", body, headers=headers)

        title = [system("You are a title generator. You output ONLY a thread title."), user("Generate:"), user("fix")]
        tools = [function_tool("bash"), function_tool("task")]
        await turn(title, "ses_1")
        await turn([system("You are opencode."), user("fix")], "ses_1", tools=tools, tool_choice="auto")
        await turn([system("You are opencode."), user("look")], "ses_2", "ses_1", tools=tools[:1], tool_choice="auto")
        tree = await server.tree("ses_1")
        assert [node["purpose"] for node in tree] == ["title", "main", "subagent"]


async def test_a_sub_agent_of_opencode_that_once_named_its_caller_stays_in_its_session(tmp_path: Path) -> None:
    """opencode asks for a summary of a sub-agent's conversation without the header that names the caller."""
    async with serving(tmp_path, says(*"abcdef")) as server:

        async def turn(text: str, session: str, parent: str | None = None) -> None:
            headers = {"x-session-id": session} | ({"x-parent-session-id": parent} if parent else {})
            body = {"model": "m", "max_tokens": 64, "messages": [user(text)]}
            await server.ok("/v1/chat/completions", body, headers=headers)

        await turn("fix", "ses_1")
        await turn("look", "ses_2", "ses_1")
        await turn("sum up", "ses_2")
        await turn("look closer", "ses_3", "ses_2")
        await turn("sum up closer", "ses_3")
        await turn("another task", "ses_4")
        assert len(await server.tree("ses_1")) == 5
        assert len(await server.tree("ses_4")) == 1


@pytest.mark.parametrize("content", [None, "", []])
async def test_a_tool_loop_of_pi_and_qwen_code_is_one_sample(tmp_path: Path, content: Any) -> None:
    """They echo calls without content, arguments serialised again, and results as text parts."""
    async with serving(tmp_path, says(call_text("bash", '{"command":  "ls"}'), "done")) as server:
        tools = [function_tool("bash")]
        messages: list[Any] = [system("You are an agent."), user("list the files")]
        answer = await server.answer(messages, tools=tools, store=False)
        (call,) = answer["tool_calls"]
        call = {**call, "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
        result = tool_result(call["id"], "")
        result["content"] = [{"type": "text", "text": "notes.txt"}]
        await server.answer([*messages, assistant(content, tool_calls=[call]), result], tools=tools, store=False)
        (sample,) = await server.export()
        assert len(sample["interaction_ids"]) == 2


WEATHER = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": {
        "additionalProperties": False,
        "properties": {"city": {"title": "City", "type": "string"}},
        "required": ["city"],
        "type": "object",
    },
}


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["unary", "stream"])
async def test_anthropics_tool_runner_goes_on_without_a_thread(tmp_path: Path, more: dict[str, Any]) -> None:
    """Captured from anthropic 2.12.0 (Python); @anthropic-ai/sdk 1.12.0 (JavaScript) sends the same fields."""
    question = {"role": "user", "content": "Paris?"}
    body = {"max_tokens": 64, "messages": [question], "model": "m", "tools": [WEATHER], **more}
    headers = {"anthropic-version": "2026-10-21", "x-stainless-helper": "BetaToolRunner, message-thread"}
    threads = {**headers, "anthropic-beta": "message-threads-2026-08-12"}
    async with serving(tmp_path, says(call_text("get_weather", '{"city": "Paris"}'), "Sunny.")) as server:
        path = "/runner/v1/messages"
        refused = await server.post(path, {**body, "thread": {"type": "create"}}, headers=threads)
        details = refused.json()["error"]["details"]
        assert (refused.status_code, details["error_code"]) == (400, "thread_unsupported_request")
        assert details["unsupported"]
        assert (await server.post(path, body, headers=headers)).status_code == 200
        turn = (await server.http.get("/rl/sessions/runner/interactions/0", params={"include": "messages"})).json()
        (call,) = turn["output"]["tool_calls"]
        use = {"id": call["id"], "input": {"city": "Paris"}, "name": "get_weather", "type": "tool_use"}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "21"}
        echo = [question, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        assert (await server.post(path, {**body, "messages": echo}, headers=headers)).status_code == 200
        assert [node["reason"] for node in await server.tree("runner")] == ["first", "continued"]
