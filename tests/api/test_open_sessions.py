"""What an open session holds in memory (`tests.bench.open_sessions` measures it)."""

from __future__ import annotations

from pathlib import Path

from tests.bench.watching import held_by
from tests.support import Server, call_text, function_tool, says, serving, system, tool_result, user

TURNS = 6
TOOL = function_tool("read", {"line": {"type": "integer"}})
CALL = call_text("read", '{"line": 1}')


async def converse(server: Server, session: str) -> None:
    """Run turns with a tool call each, under a system message that all sessions have."""
    await server.ok("/rl/start_session", {"session_id": session, "task_id": "t", "api_key": f"key-{session}"})
    headers, history = {"authorization": f"Bearer key-{session}"}, [system("Be good."), user(f"begin {session}")]
    for _ in range(TURNS):
        body = {"model": "m", "messages": history, "tools": [TOOL]}
        reply = await server.ok("/v1/chat/completions", body, headers=headers)
        answer = reply["choices"][0]["message"]
        history += [answer, tool_result(answer["tool_calls"][0]["id"], f"line of {session} {len(history)}")]


async def test_the_objects_of_a_session_do_not_grow_unnoticed(tmp_path: Path) -> None:
    """Each takes memory, and time of the collector that freezes it."""
    async with serving(tmp_path, says(*[CALL] * 200)) as server:
        for number in range(8):
            await converse(server, f"s{number}")
        held = held_by(server.app.state.registry.sessions())
        objects = {name: count for name, (count, _) in held.items()}
        assert "Tool" not in objects  # all have the same
        assert sum(objects.values()) <= 540, objects
