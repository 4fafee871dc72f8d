"""What has ended is freed by the count of its references: frozen objects in cycles would stay (`resources.garbage`)."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest

from tests.support import Server, call_text, function_tool, says, serving, tool_result, user

CALL = call_text("look", '{"at": "x"}')
TOOLS = [function_tool("look", {"at": {"type": "string"}})]
BODY = {"model": "m", "max_tokens": 200}


async def play(server: Server, session: str) -> None:
    """A session of each kind of turn, with a reward, an end and an export; then it leaves memory or is deleted."""
    first = await server.answer([user("hi")], session, tools=TOOLS)
    result = tool_result(first["tool_calls"][0]["id"], "seen")
    await server.answer([user("hi"), first, result], session, tools=TOOLS)
    streamed = {**BODY, "stream": True, "messages": [user("hi"), first, result], "tools": TOOLS}
    assert (await server.post(f"/{session}/v1/chat/completions", streamed)).status_code == 200
    assert (await server.post(f"/{session}/v1/messages", {**BODY, "messages": [user("and")]})).status_code == 200
    assert (await server.post(f"/{session}/v1/responses", {"model": "m", "input": "so"})).status_code == 200
    assert (await server.post(f"/{session}/v1/chat/completions", {"messages": "wrong"})).status_code == 400
    await server.ok(f"/{session}/rl/set_reward", {"reward": 1.0})
    await server.ok(f"/{session}/rl/end_session", {})
    await server.export(session)


def left_behind() -> Counter[str]:
    """Collect, and return the types of this project's objects that only the collector could free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        types = [type(value) for value in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    names = (f"{each.__module__}.{each.__qualname__}" for each in types)
    return Counter(name for name in names if name.startswith(("proxy.", "tokengrove.")))


@pytest.mark.parametrize("how", ["forgotten", "deleted"])
async def test_sessions_and_turns_leave_no_cycles(how: str, tmp_path: Path) -> None:
    async with serving(tmp_path, says(*[CALL] * 20)) as server:
        await play(server, "warm")  # makes what is made once
        gc.collect()
        gc.disable()
        gc.freeze()  # what earlier tests left, and a finalizer of theirs kept for one collection more, is not counted
        try:
            await play(server, "s")
            if how == "forgotten":
                server.forget_sessions()
            else:
                assert (await server.http.delete("/rl/sessions/s")).status_code == 200
            assert left_behind() == Counter()
        finally:
            gc.unfreeze()
            gc.enable()
