"""A turn enters as many Python functions in a long session as in a short one, however many other sessions are open."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import proxy
from proxy.api import bodies
from proxy.trajectory.cache import InteractionCache, Node
from proxy.types import Interaction
from tests.support import LoopPasses, Server, assistant, call_text, function_tool, says, serving, tool_result, user

OURS = str(Path(proxy.__file__).parent)
TOOL = function_tool("read", {"line": {"type": "integer"}})
CALL = call_text("read", '{"line": 1}')
Calls = Counter[str]
WATCHES = frozenset(
    {"ProcessMetrics.watch_loop", "Writer.watch", "History.run", "TurnLog._queue_begun", "TurnLog._queue_replied"}
)
"""What runs now and then, whatever the turns do."""


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the entries of the project's functions in this thread."""
    calls = Calls()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS) and not of_a_watch(frame):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
    for wakes_the_writer in ("Writer._ring", "Writer._wake"):  # or not, if its thread is at work
        del calls[wakes_the_writer]


def of_a_watch(frame: FrameType) -> bool:
    above: FrameType | None = frame
    while above is not None:
        if above.f_code.co_qualname in WATCHES:
            return True
        above = above.f_back
    return False


def chat_history(turns: int) -> list[Any]:
    history = [user("begin")]
    for turn in range(turns):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        history += [assistant(None, tool_calls=[call]), tool_result(f"c{turn}", f"line {turn}")]
    return history


async def chat(server: Server, history: list[Any]) -> None:
    answer = await server.answer(history, tools=[TOOL])
    history += [answer, tool_result(answer["tool_calls"][0]["id"], f"line of {len(history)}")]


def responses_history(turns: int) -> list[Any]:
    history = [user("begin")]
    for turn in range(turns):
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "read", "arguments": "{}"}
        history += [call, {"type": "function_call_output", "call_id": f"c{turn}", "output": f"line {turn}"}]
    return history


async def responses(server: Server, history: list[Any]) -> None:
    tools = [{"type": "function", **TOOL["function"]}]
    reply = await server.ok("/s/v1/responses", {"model": "m", "input": history, "tools": tools})
    (call,) = reply["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": f"line of {len(history)}"}
    history += [call, output]


def messages_history(turns: int) -> list[Any]:
    history = [user("begin")]
    for turn in range(turns):
        history.append(assistant([{"type": "tool_use", "id": f"c{turn}", "name": "read", "input": {}}]))  # type: ignore[arg-type]
        history.append(user([{"type": "tool_result", "tool_use_id": f"c{turn}", "content": f"line {turn}"}]))  # type: ignore[arg-type]
    return history


async def messages(server: Server, history: list[Any]) -> None:
    """As Claude Code: the last message is marked, and is no longer in the next turn."""
    tools = [{"name": "read", "input_schema": TOOL["function"]["parameters"]}]
    marked = [*history[:-1], {**history[-1], "cache_control": {"type": "ephemeral"}}]
    body = {"model": "m", "messages": marked, "tools": tools, "max_tokens": 100}
    reply = await server.ok("/s/v1/messages", body)
    call = reply["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"line of {len(history)}"}
    history += [assistant(reply["content"]), user([result])]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("history_of", "turn"),
    [(chat_history, chat), (responses_history, responses), (messages_history, messages)],
    ids=["chat", "responses", "messages"],
)
async def test_a_turn_that_sends_a_long_history_calls_no_more_functions_than_one_with_a_short_history(
    tmp_path: Path,
    history_of: Callable[[int], list[Any]],
    turn: Callable[[Server, list[Any]], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A body of more than 128 KiB takes some more steps, as many for any length, and is parsed in another thread.
    monkeypatch.setattr(bodies, "FREE", 2**30)
    monkeypatch.setattr(bodies, "INLINE", 2**30)
    monkeypatch.setattr(bodies, "INLINE_WORK", 2**30)
    entries = []
    for turns in (50, 500):
        (folder := tmp_path / str(turns)).mkdir()
        async with serving(folder, says(*[CALL] * 4)) as server:
            history = history_of(turns)
            for _ in range(3):
                await turn(server, history)
            with counted() as calls:
                await turn(server, history)
            entries.append(calls)
            assert len(await server.tree()) == 4
            assert [node["reason"] for node in await server.tree()] == ["first", "continued", "continued", "continued"]
    assert entries[1] - entries[0] == Calls()


async def test_a_turn_that_names_its_history_calls_no_more_functions_late_than_early(tmp_path: Path) -> None:
    entries = {}
    async with serving(tmp_path, says(*["yes"] * 61)) as server:
        body: dict[str, Any] = {"model": "m", "input": "begin", "instructions": "rules"}
        for turn in range(61):
            with counted() as calls:
                reply = await server.ok("/s/v1/responses", body)
            entries[turn] = calls
            body |= {"previous_response_id": reply["id"], "input": f"and {turn}"}
        assert {node["reason"] for node in await server.tree()} == {"first", "continued"}
    assert entries[60] - entries[20] == Calls()


async def same_prompt(server: Server, turn: int) -> None:
    """A prompt that is sampled again and again, and one of its equal answers is continued."""
    answer = await server.answer([user("begin")])
    await server.answer([user("begin"), answer, user(f"and {turn}")])


async def own_prompts(server: Server, turn: int) -> None:
    """Conversations of their own in one session, each with a reward."""
    reply = await server.chat([user(f"task {turn}")])
    await server.ok("/s/rl/set_reward", {"interaction_id": reply["id"], "reward": 1.0})
    await server.ok("/s/rl/set_reward", {"reward": 0.5})


async def given_ids(server: Server, turn: int) -> None:
    ids = [5, 6, 7] * (turn + 1)
    await server.ok("/s/v1/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}})


@pytest.mark.parametrize("step", [same_prompt, own_prompts, given_ids])
async def test_a_step_of_a_session_with_many_turns_calls_no_more_functions_than_one_of_a_session_with_few(
    tmp_path: Path, step: Callable[[Server, int], Awaitable[None]]
) -> None:
    entries = {}
    file = f"sqlite:///{tmp_path / 'test.db'}"  # a shared database is asked for the rewards of all turns after each
    async with serving(tmp_path, says(*["yes"] * 120), database_url=file) as server:
        for turn in range(60):
            with counted() as calls:
                await step(server, turn)
            entries[turn] = calls
    assert entries[59] - entries[20] == Calls()


async def test_a_long_session_is_loaded_in_many_passes_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests run between them."""
    monkeypatch.setattr("proxy.sessions.registry._ABSORBED_AT_ONCE", 2)
    passes, placed = LoopPasses(monkeypatch), Counter[int]()
    place = InteractionCache.place_stored

    def counted_place(self: InteractionCache, interaction: Interaction) -> Node:
        placed[passes.count] += 1
        return place(self, interaction)

    monkeypatch.setattr(InteractionCache, "place_stored", counted_place)
    async with serving(tmp_path, says(*["yes"] * 9)) as server:
        history: list[Any] = []
        for turn in range(7):
            history.append(user(f"and {turn}"))
            history.append(await server.answer(history))
        await server.answer(history[:1])
        tree = await server.tree()
        server.forget_sessions()
        await server.answer([*history, user("go on")])
        assert [node["id"] for node in (await server.tree())[:-1]] == [node["id"] for node in tree]
        assert (await server.tree())[-1]["reason"] == "continued"
    assert max(placed.values()) == 2 and placed.total() == 8


async def test_a_turn_enters_as_many_functions_however_many_sessions_are_open(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*[CALL] * 200)) as server:
        entered = list[Calls]()
        for session, others in (("warm", 0), ("few", 0), ("many", 100)):
            for number in range(others):
                await server.answer([user("begin")], f"{session}{number}", tools=[TOOL])
            first = await server.answer([user("begin")], session, tools=[TOOL])
            history = [user("begin"), first, tool_result(first["tool_calls"][0]["id"], "line")]
            with counted() as calls:
                await server.answer(history, session, tools=[TOOL])
            entered.append(calls)
        assert entered[1] == entered[2]
        assert sum(entered[2].values()) > 100
