"""Tools that OpenAI defines and clients run, with the real SDK: typed calls, and one chain over all turns."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.planned import follow
from tests.support import Server, function_tool, says, serving, tiny_renderer, user
from tests.wide import CROSSED

PATCH = '*** Begin Patch\n+x = "1"\n*** End Patch'
REGEX = {"type": "grammar", "syntax": "regex", "definition": r"\*\*\* Begin Patch\n[\s\S]+"}
CHAT_EDIT = {"name": "edit", "format": {"type": "grammar", "grammar": REGEX}}
# The tool, the arguments of the model, the type of the call's item, what the item has, and what the client answers.
TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "shell": (
        {"type": "shell"},
        {"commands": ["ls", "false"], "timeout_ms": 5000},
        "shell_call",
        {"action": {"commands": ["ls", "false"], "timeout_ms": 5000}},
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "no\n", "outcome": {"type": "exit", "exit_code": 1}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
    ),
    "local_shell": (
        {"type": "local_shell"},
        {"command": ["bash", "-lc", "ls"], "working_directory": "/w"},
        "local_shell_call",
        {"action": {"type": "exec", "command": ["bash", "-lc", "ls"], "env": {}, "working_directory": "/w"}},
        {"type": "local_shell_call_output", "output": '{"output": "a.py"}'},
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        {"type": "update_file", "path": "a.py", "diff": "@@\n-x\n+y\n"},
        "apply_patch_call",
        {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-x\n+y\n"}},
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such line"},
    ),
    "custom": (
        {"type": "custom", "name": "edit", "description": "Edits.", "format": REGEX},
        {"input": PATCH},
        "custom_tool_call",
        {"name": "edit", "input": PATCH},
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "done"}]},
    ),
    "tool_search": (
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {}}},
        {"query": "weather"},
        "tool_search_call",
        {"arguments": {"query": "weather"}, "execution": "client"},
        {"type": "tool_search_output", "execution": "client", "tools": [{"type": "function", "name": "weather"}]},
    ),
}
SHOWN = {
    "shell": "a.py\n[exit code 0]\nno\n[exit code 1]\n[timed out]",
    "local_shell": '{"output": "a.py"}',
    "apply_patch": "no such line\n[failed]",
    "custom": "done",
    "tool_search": '[{"type":"function","name":"weather"}]',
}
NAMES = {"custom": "edit"}
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def planned(kind: str) -> dict[str, Any]:
    """A user message after which the model calls the tool of this kind, and then shows its result."""
    call = {"name": NAMES.get(kind, kind), "arguments": TOOLS[kind][1]}
    steps = [{"think": "hm", "say": "Let me see.", "calls": [call]}, {"say": "It says: {results}"}]
    return user(f"PLAN: {json.dumps(steps)}")


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://t/s/v1", api_key="any", http_client=server.http, max_retries=0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path, follow(tiny_renderer())) as server:
        yield server


async def ask(client: openai.AsyncOpenAI, stream: bool, **body: Any) -> tuple[Any, list[Any]]:
    """Return the final response and the events of the SDK."""
    if not stream:
        return await client.responses.create(model="m", **body), []
    async with client.responses.stream(model="m", **body) as events:
        seen = [event async for event in events]
        return await events.get_final_response(), seen


async def assert_one_chain(server: Server, turns: int) -> None:
    tree = await server.tree()
    (sample,) = await server.export(train={"constrained": True})
    assert sample["interaction_ids"] == [node["id"] for node in tree] and len(tree) == turns
    assert all(node["aligned"] and not node["notes"].get("echo") for node in tree[1:])
    assert sum(sample["loss_mask"]) == sum(node["output_tokens"] for node in tree)


@CROSSED
@BOTH
@pytest.mark.parametrize("kind", TOOLS)
async def test_a_call_has_the_type_of_its_tool_and_the_next_turn_continues_its_tokens(
    server: Server, kind: str, stream: bool
) -> None:
    tool, _, call_type, fields, answer = TOOLS[kind]
    client, history = client_of(server), [planned(kind)]
    response, _ = await ask(client, stream, input=history, tools=[tool])
    call = response.output[-1]
    assert call.type == call_type and call.status == "completed"
    assert fields.items() <= call.model_dump(exclude_unset=True).items()
    assert [each.type for each in response.tools] == [tool["type"]]
    history += [item.model_dump(exclude_unset=True) for item in response.output]
    history.append({**answer, "call_id": call.call_id})
    response, _ = await ask(client, stream, input=history, tools=[tool])
    assert response.output_text == f"It says: {SHOWN[kind]}"
    await assert_one_chain(server, turns=2)


@pytest.mark.parametrize("kind", TOOLS)
async def test_the_turn_continues_by_the_previous_response_and_without_ids_of_items(server: Server, kind: str) -> None:
    tool, *_, answer = TOOLS[kind]
    client, history = client_of(server), [planned(kind)]
    response, _ = await ask(client, False, input=history, tools=[tool])
    result = {**answer, "call_id": response.output[-1].call_id}
    await ask(client, False, input=[result], tools=[tool], previous_response_id=response.id)
    history += [item.model_dump(exclude_unset=True, exclude={"id"}) for item in response.output]
    again, _ = await ask(client, False, input=[*history, result], tools=[tool])
    assert again.output_text == f"It says: {SHOWN[kind]}"
    first, second, third = await server.tree()
    assert (second["parent_id"], third["parent_id"]) == (first["id"], first["id"])
    assert second["aligned"] and third["aligned"]


@pytest.mark.parametrize(
    ("kind", "names", "joined"),
    [
        ("custom", ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"], PATCH),
        ("shell", [f"response.shell_call_command.{each}" for each in ("added", "delta", "done")] * 2, "lsfalse"),
    ],
)
async def test_a_stream_has_the_events_of_the_sdk_for_the_call(
    server: Server, kind: str, names: list[str], joined: str
) -> None:
    body = {"model": "m", "input": [planned(kind)], "tools": [TOOLS[kind][0]]}
    raw = [event async for event in await client_of(server).responses.create(**body, stream=True)]
    at = next(index for index, event in enumerate(raw) if getattr(event, "item", None) and "call" in event.item.type)
    assert raw[at].type == "response.output_item.added" and raw[at].item.status == "in_progress"
    assert [event.type for event in raw[at + 1 :]][: len(names) + 1] == [*names, "response.output_item.done"]
    assert "".join(event.delta for event in raw[at + 1 :] if event.type.endswith(".delta")) == joined


async def test_a_computer_is_a_function_whose_calls_are_its_items(server: Server) -> None:
    action = {"type": "click", "x": 5, "y": 7, "button": "left"}
    old = {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"}
    for tool, arguments in ((old, action), ({"type": "computer"}, {"actions": [action]})):
        steps = json.dumps([{"calls": [{"name": "computer", "arguments": arguments}]}])
        asked = {"input": [user(f"PLAN: {steps}")], "tools": [tool]}
        response, _ = await ask(client_of(server), True, **asked)
        call = response.output[-1]
        assert call.type == "computer_call" and call.pending_safety_checks == []
        shown = call.model_dump(exclude_unset=True)
        assert shown.get("action", {"actions": shown.get("actions")}) == arguments
    assert "800 x 600" in server.engine.requests[0].turn.tools[0].description


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("shell", {"type": "shell"}),
        ("apply_patch", {"type": "apply_patch"}),
        ("local_shell", {"type": "local_shell"}),
        ("custom", {"type": "custom", "name": "edit"}),
        ("custom", {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "edit"}]}),
    ],
)
async def test_a_tool_choice_forces_such_a_tool(server: Server, kind: str, choice: Any) -> None:
    tools = [TOOLS[kind][0], {"type": "function", "name": "other"}]
    await server.ok("/s/v1/responses", {"model": "m", "input": "go", "tools": tools, "tool_choice": choice})
    grammar = server.engine.requests[-1].grammar
    assert grammar is not None and len(grammar.alternatives) == 1
    assert NAMES.get(kind, kind) in "".join(part.text for part in grammar.alternatives[0])


@BOTH
async def test_a_custom_tool_of_a_chat_is_called_with_its_input(server: Server, stream: bool) -> None:
    client = client_of(server)
    tool = {"type": "custom", "custom": CHAT_EDIT}
    history, steps = [planned("custom")], []
    for _ in range(2):
        body = {"model": "m", "messages": history, "tools": [tool]}
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
            deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            calls = [{"id": call.id, **call.model_dump(exclude_unset=True)} for call in deltas]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            if calls:
                given = "".join(call["custom"].get("input", "") for call in calls)
                calls = [{"id": calls[0]["id"], "type": "custom", "custom": {"name": "edit", "input": given}}]
        else:
            message = (await client.chat.completions.create(**body)).choices[0].message
            text, calls = message.content, [call.model_dump() for call in message.tool_calls or ()]
        steps.append((text, calls))
        history.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
    ((_, (call,)), (text, _)) = steps
    assert (call["type"], call["custom"]) == ("custom", {"name": "edit", "input": PATCH})
    assert text == "It says: done"
    await assert_one_chain(server, turns=2)


@pytest.mark.parametrize(
    "body", [{"tools": [{"type": "shell"}]}, {"tools": [{"type": "custom", "name": "x", "format": REGEX}]}]
)
async def test_a_reply_is_replayed_and_its_request_is_written_with_the_tools_own_types(
    server: Server, body: dict[str, Any]
) -> None:
    name = body["tools"][0].get("name", "shell")
    steps = json.dumps([{"calls": [{"name": name, "arguments": {"input": "a", "commands": []}}]}])
    asked = {"model": "m", "input": [user(f"PLAN: {steps}")], **body}
    response = await server.ok("/s/v1/responses", asked)
    turn = (await server.tree())[0]["id"]
    shown = (await server.http.get(f"/rl/sessions/s/interactions/{turn}?include=request,reply")).json()
    assert shown["request"]["body"]["tools"] == body["tools"] and shown["request"]["lacks"] == []
    assert shown["reply"]["output"] == response["output"]


async def test_the_model_is_held_to_the_grammar_of_a_custom_tool_where_it_chooses_freely(server: Server) -> None:
    tools = [TOOLS["custom"][0], {"type": "function", "name": "other"}]
    await server.ok("/s/v1/responses", {"model": "m", "input": "go", "tools": tools})
    grammar = server.engine.requests[-1].grammar
    schemas = [part.schema for parts in grammar.alternatives for part in parts if part.schema is not None]
    assert grammar.repeat and len(schemas) == 2
    assert schemas[0]["properties"]["input"]["pattern"] == f"^(?:{REGEX['definition']})$"
    for loose in ({"tools": [{"type": "custom", "name": "edit"}]}, {"tools": tools, "tool_choice": "none"}):
        await server.ok("/s/v1/responses", {"model": "m", "input": "go", **loose})
        assert server.engine.requests[-1].grammar is None


async def test_tools_in_an_item_are_the_tools_of_the_request(server: Server) -> None:
    tools = [{"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}]
    steps = json.dumps([{"calls": [{"name": "exec", "arguments": {"input": "ls()"}}]}])
    items = [{"type": "additional_tools", "role": "developer", "tools": tools}, user(f"PLAN: {steps}")]
    response = await server.ok("/s/v1/responses", {"model": "m", "input": items})
    call = response["output"][-1]
    assert (call["type"], call["namespace"], call["name"], call["input"]) == (
        *("custom_tool_call", "functions", "exec"),
        "ls()",
    )
    assert [tool.name for tool in server.engine.requests[-1].turn.tools] == ["exec"]


async def test_a_message_of_another_agent_is_one_of_the_user_and_a_ciphertext_is_refused(server: Server) -> None:
    head = {"type": "input_text", "text": "Payload:\n"}
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a"}
    for secret, status in (("do it", 200), ("gAAAA" + "Zm9v" * 20, 400)):
        content = [head, {"type": "encrypted_content", "encrypted_content": secret}]
        reply = await server.post("/s/v1/responses", {"model": "m", "input": [{**item, "content": content}]})
        assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == "input[0].content[1]"
    assert server.engine.requests[-1].turn.messages[-1].content == "Payload:\ndo it"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "only OpenAI can read"),
        ({"type": "context_compaction"}, "only OpenAI can read"),
        ({"type": "compaction_trigger"}, "is not OpenAI"),
        ({"type": "configuration_update", "reasoning": {"effort": "low"}}, "in the body of the request"),
    ],
)
async def test_an_item_that_cannot_be_honoured_is_refused_with_the_way_out(
    server: Server, item: dict[str, Any], said: str
) -> None:
    reply = await server.post("/s/v1/responses", {"model": "m", "input": [user("hi"), item]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input[1]")
    assert item["type"] in error["message"] and said in error["message"]


async def test_unknown_types_are_refused_with_the_accepted_ones(server: Server) -> None:
    for path, body, param in (
        ("responses", {"input": [{"type": "shel_call"}]}, "input[0].type"),
        ("responses", {"input": "hi", "tools": [{"type": "shel"}]}, "tools[0].type"),
        ("chat/completions", {"messages": [user("hi")], "tools": [{"type": "shel"}]}, "tools[0].type"),
    ):
        reply = await server.post(f"/s/v1/{path}", {"model": "m", **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert "'shel" in error["message"] and "custom" in error["message"]


async def test_calls_that_another_server_ran_are_shown_with_their_results(server: Server) -> None:
    items = [
        user("hi"),
        {"type": "mcp_call", "id": "mcp_1", "name": "find", "arguments": '{"q": 1}', "output": "found"},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": [{"filename": "f", "text": "t"}]},
        {"type": "program", "id": "p", "call_id": "p_1", "code": "f()", "fingerprint": "x"},
        {"type": "program_output", "id": "o", "call_id": "p_1", "result": "3", "status": "completed"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    ]
    reply = await server.post("/s/v1/responses", {"model": "m", "input": items})
    assert reply.headers["x-tokengrove-ignored"] == "input[6] of type web_search_call"
    shown = [message for message in server.engine.requests[-1].turn.messages if message.role != "user"]
    calls = [call.name for message in shown for call in message.tool_calls]
    assert calls == ["find", "code_interpreter", "file_search", "programmatic_tool_calling"]
    assert [message.content for message in shown if message.role == "tool"] == ["found", "2", "f\nt", "3"]


async def test_an_engine_that_holds_no_grammar_refuses_one_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        server.engine._info = replace(server.engine._info, capabilities=frozenset())
        for path, tool in (
            ("responses", TOOLS["custom"][0]),
            ("chat/completions", {"type": "custom", "custom": CHAT_EDIT}),
        ):
            said = {"input": "hi"} if path == "responses" else {"messages": [user("hi")]}
            body = {"model": "m", **said, "tools": [function_tool("f") if path != "responses" else tool, tool]}
            error = (await server.post(f"/s/v1/{path}", body)).json()["error"]
            assert error["param"].startswith("tools[") and error["param"].endswith(".format")
