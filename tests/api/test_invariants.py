"""The seven invariants of the design, each on random agents: whatever an agent does with its history, they hold.

An agent is a list of moves drawn by hypothesis; the server is the real one on the scripted engine.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine.scripted import Fault, Reply
from proxy.server import serving as real_server
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.rewards import compute_returns
from proxy.types import Credit, GenerateRequest, Interaction, Status
from tests.support import (
    Server,
    assistant,
    call_text,
    function_tool,
    sampled,
    serving,
    system,
    tool_result,
    user,
)

TOOLS = [function_tool("add", {"a": {"type": "integer"}})]
MOVES = ("append", "append", "retry", "rewrite", "fork", "root", "tools", "reasoning", "rename", "fail", "cut", "twice")
SESSIONS = ("one", "two")
moves = st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from(SESSIONS), st.integers(0, 2**16)), max_size=12)


class Agent:
    """Plays moves against a server; every conversation it had can be gone back to."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.histories: dict[str, list[list[Any]]] = {name: [[system("S"), user("q")]] for name in SESSIONS}

    async def play(self, move: str, session: str, number: int) -> None:
        chooser = random.Random(number)
        histories = self.histories[session]
        history = list(histories[-1] if move not in ("fork", "retry") else chooser.choice(histories))
        if move == "root":
            history = [user(f"other {number % 3}")]
        elif move == "rewrite":
            history = [self._edited(message, number) for message in history]
        elif move == "reasoning":
            history = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in history]
        elif move == "rename":
            history = _renamed(history, number)
        tools = TOOLS if move != "tools" else [*TOOLS, function_tool(f"t{number % 2}")]
        if move == "twice":
            await asyncio.gather(*(self._turn(session, history, tools, number) for _ in range(2)))
        else:
            await self._turn(session, history, tools, number)

    def _edited(self, message: Any, number: int) -> Any:
        return assistant(f"edited {number % 3}") if message["role"] == "assistant" and number % 2 else message

    async def _turn(self, session: str, history: list[Any], tools: list[Any], number: int) -> None:
        body = {"model": "m", "messages": history, "tools": tools, "stream": number % 3 == 0}
        response = await self.server.post(f"/{session}/v1/chat/completions", body)
        if response.status_code != 200 or body["stream"]:
            return
        message = response.json()["choices"][0]["message"]
        results = [tool_result(call["id"], "result") for call in message.get("tool_calls") or []]
        self.histories[session].append([*history, message, *(results or [user(f"next {number % 4}")])])


def _renamed(history: list[Any], number: int) -> list[Any]:
    out = []
    for message in history:
        renamed = dict(message)
        if renamed.get("tool_calls"):
            renamed["tool_calls"] = [{**call, "id": f"{call['id']}-{number}"} for call in renamed["tool_calls"]]
        if renamed["role"] == "tool":
            renamed["tool_call_id"] = f"{renamed['tool_call_id']}-{number}"
        out.append(renamed)
    return out


class RandomEngine:
    """A script: answers of many kinds, some cut, some failing; remembers what it was given and what it gave."""

    def __init__(self, moves: list[tuple[str, str, int]]) -> None:
        self.chooser = random.Random(str(moves))
        self.given: dict[str, tuple[list[int], list[int]]] = {}

    def __call__(self, request: GenerateRequest) -> Reply:
        thought = self.chooser.choice(["", "<think>\nhm\n</think>\n\n"])
        text = self.chooser.choice(["yes", "no", "maybe so", call_text("add", '{"a": 1}'), "<tool_call>\nbroken"])
        kind = self.chooser.choice(["whole", "whole", "whole", "cut", "fail", "short"])
        ids = sampled(thought + text, end=kind != "cut")
        fault = {"fail": Fault.ERROR, "short": Fault.BAD_LENGTHS}.get(kind)
        self.given[request.request_id] = (list(request.input_ids), list(ids))
        return Reply(ids, chunk=self.chooser.choice([1, 3, 100]), fault=fault, fault_after=2)


async def played(drawn: list[tuple[str, str, int]], folder: Path) -> tuple[RandomEngine, dict[str, Any]]:
    engine = RandomEngine(drawn)
    async with serving(folder, engine) as server:
        agent = Agent(server)
        for move in drawn:
            await agent.play(*move)
        exports = {name: await server.export(name) for name in SESSIONS if any(move[1] == name for move in drawn)}
    return engine, exports


async def stored(folder: Path) -> dict[str, list[Interaction]]:
    store = Store.open(f"sqlite:///{folder / 'test.db'}")
    try:
        return {name: await store.load_interactions(name) for name in SESSIONS}
    finally:
        await store.close()


def run(drawn: list[tuple[str, str, int]]) -> tuple[RandomEngine, dict[str, Any], dict[str, list[Interaction]]]:
    with tempfile.TemporaryDirectory() as name:
        engine, exports = asyncio.run(played(drawn, Path(name)))
        return engine, exports, asyncio.run(stored(Path(name)))


@settings(max_examples=40, deadline=None)
@given(moves)
def test_invariants_1_2_3_5_6_hold_whatever_the_agent_does(drawn: list[tuple[str, str, int]]) -> None:
    engine, exports, sessions = run(drawn)
    seen: set[str] = set()
    for name, interactions in sessions.items():
        check_token_exactness(engine, interactions)
        check_prefix_truth(engine, interactions)
        check_trained_once(exports.get(name, []), interactions)
        check_all_or_nothing(interactions, exports.get(name, []))
        check_isolation(name, interactions, seen)


def check_token_exactness(engine: RandomEngine, interactions: list[Interaction]) -> None:
    """Invariant 1, from the database alone."""
    cache = InteractionCache(interactions)
    for node in cache.nodes.values():
        interaction = node.interaction
        prompt, output = engine.given[interaction.id]
        assert list(cache.token_ids(node)) == prompt + output
        assert interaction.prompt_tokens == len(prompt)
        assert len(interaction.output_ids) == len(interaction.logprobs) == sum(n for n, _ in interaction.versions)


def check_prefix_truth(engine: RandomEngine, interactions: list[Interaction]) -> None:
    """Invariant 2."""
    for interaction in interactions:
        if interaction.aligned:
            assert interaction.parent_id is not None
            prompt, output = engine.given[interaction.parent_id]
            assert engine.given[interaction.id][0][: len(prompt) + len(output)] == prompt + output


def check_trained_once(samples: list[Any], interactions: list[Interaction]) -> None:
    """Invariant 3: each sampled token of a complete interaction has mask 1 in exactly one sample."""
    trained: dict[str, int] = {}
    for sample in samples:
        for turn in sample["turns"]:
            start, end = turn["span"]
            ids = turn["interaction_id"]
            trained[ids] = trained.get(ids, 0) + sum(sample["loss_mask"][start:end])
    complete = [i for i in interactions if i.status is Status.COMPLETE]
    assert trained == {i.id: len(i.output_ids) for i in complete}
    assert sum(sum(sample["loss_mask"]) for sample in samples) == sum(len(i.output_ids) for i in complete)


def check_all_or_nothing(interactions: list[Interaction], samples: list[Any]) -> None:
    """Invariant 5: what failed is kept with its status, has no children and is not exported."""
    failed = {i.id for i in interactions if i.status is not Status.COMPLETE}
    assert not failed & {i.parent_id for i in interactions}
    assert not failed & {name for sample in samples for name in sample["interaction_ids"]}
    assert all(i.error for i in interactions if i.id in failed)


def check_isolation(name: str, interactions: list[Interaction], seen: set[str]) -> None:
    """Invariant 6: no id in two sessions, no seq twice, every parent in the same session and before."""
    order = {i.id: i.seq for i in interactions}
    assert not seen & set(order)
    seen.update(order)
    assert sorted(order.values()) == list(range(len(order)))
    assert all(i.session_id == name for i in interactions)
    assert all(order[i.parent_id] < i.seq for i in interactions if i.parent_id is not None)


def test_invariant_4_no_end_goes_out_while_the_database_cannot_commit(tmp_path: Path) -> None:
    """Somebody else holds the database's write lock: the text streams, its end waits for the commit."""
    database = tmp_path / "held.db"
    settings = Settings(port=0, database_url=f"sqlite:///{database}", engine="scripted", log_level="warning")
    body = {"model": "m", "messages": [user("hi")], "stream": True, "max_tokens": 5}
    with real_server(settings) as url, closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        lines: list[str] = []
        client = threading.Thread(target=read_stream, args=(f"{url}/s/v1/chat/completions", body, lines))
        client.start()
        wait_until(lambda: any('"content":"' in line and '"content":""' not in line for line in lines))
        time.sleep(0.5)
        assert not any('"finish_reason":"' in line for line in lines)
        other.execute("ROLLBACK")
        client.join()
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]


def read_stream(url: str, body: Any, lines: list[str]) -> None:
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                lines.append(line)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=4), st.floats(0, 1), st.sampled_from(Credit))
def test_invariant_7_rewards_stay_as_set_beside_their_returns(
    rewards: list[float], discount: float, credit: Credit
) -> None:
    async def scenario(folder: Path) -> None:
        async with serving(folder, lambda request: Reply(sampled("x"))) as server:
            start = {"task_id": "t", "session_id": "s", "discount": discount, "credit": credit.value}
            await server.ok("/rl/start_session", start)
            history: list[Any] = [user("q")]
            for _ in rewards:
                history += [await server.answer(history), user("next")]
            await server.ok("/s/rl/set_reward", {"step_scores": rewards})
            await server.ok("/s/rl/end_session", {})
            await server.export(discount=0.5)
            store: Store = server.app.state.store
            interactions = await store.load_interactions("s")
            assert [i.reward for i in interactions] == rewards
            wanted = compute_returns(interactions, discount, credit)
            assert await store.load_returns("s") == {(key, discount, credit): value for key, value in wanted.items()}

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(scenario(Path(name)))
