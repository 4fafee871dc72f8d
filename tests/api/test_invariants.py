"""Seven invariants that hold whatever an agent does with its history, on random conversations.

Five of them are checked after every move of a random agent against the real server on the scripted engine, from what
the store gives back.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.scripts import Fault, Reply
from proxy.serving.server import serving as real_server
from proxy.settings import Settings
from proxy.store.sql import reads
from proxy.store.sql.writes import append_interactions
from proxy.store.store import Store
from proxy.store.writer import Change, Writer
from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.returns import compute_returns
from proxy.trajectory.tree import token_ids
from proxy.types import Interaction
from tests.support import (
    Server,
    assistant,
    call_text,
    function_tool,
    sampled,
    serving,
    system,
    tiny_renderer,
    tool_result,
    user,
)
from tests.wide import WIDE
from tokengrove.options.session import Credit
from tokengrove.reasons import Status

TOOLS = [function_tool("add", {"a": {"type": "integer"}})]
SESSIONS = ("one", "two")
KINDS = ("whole", "whole", "whole", "cut", "stopped", "fail", "short")
CALL, OTHER = (call_text("add", f'{{"a": {number}}}') for number in (1, 2))
ANSWERS = ("yes", "no", "maybe so", "", CALL, f"so {CALL}", f"so {CALL}\n{OTHER}", "<tool_call>\nbroken", "same")
THOUGHTS = ("", "", "<think>\nhm\n</think>\n\n", "<think>\nother\n</think>\n\n")


class RandomEngine:
    """A script of many kinds of answers, some truncated, some failing; it records its prompts and outputs."""

    def __init__(self) -> None:
        self.chooser = random.Random(0)
        self.given: dict[str, tuple[list[int], list[int]]] = {}

    def __call__(self, request: GenerateRequest) -> Reply:
        text = self.chooser.choice(THOUGHTS) + self.chooser.choice(ANSWERS)
        kind = self.chooser.choice(KINDS)
        ids = sampled(text, end=kind != "cut") if text or kind != "cut" else sampled("x", end=False)
        if kind == "stopped":
            ids += sampled("after the end")
        fault = {"fail": Fault.ERROR, "short": Fault.BAD_LENGTHS}.get(kind)
        end = tiny_renderer().stop_token_ids[0]
        kept = list(ids[: ids.index(end) + 1]) if end in ids else list(ids)
        self.given[request.request_id] = (list(request.input_ids), kept)
        return Reply(ids, chunk=self.chooser.choice([1, 3, 100]), fault=fault, fault_after=2)


class AgentMachine(RuleBasedStateMachine):
    """An agent that edits its histories at random and may return to any earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.engine = RandomEngine()
        self.histories: dict[str, list[list[Any]]] = {name: [[system("S"), user("q")]] for name in SESSIONS}
        self.stack = AsyncExitStack()
        self.server = self.runner.run(self._open())

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()
        self.folder.cleanup()

    async def _open(self) -> Server:
        return await self.stack.enter_async_context(serving(Path(self.folder.name), self.engine))

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), stream=st.booleans())
    def append(self, session: str, seed: int, stream: bool) -> None:
        self._turns(session, self.histories[session][-1], seed, stream=stream)

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), back=st.integers(0, 20))
    def go_back_or_retry(self, session: str, seed: int, back: int) -> None:
        self._turns(session, self._history(session, back), seed)

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), text=st.sampled_from(["edited", "yes", ""]))
    def rewrite_an_answer(self, session: str, seed: int, text: str) -> None:
        history = list(self.histories[session][-1])
        answers = [at for at, message in enumerate(history) if message["role"] == "assistant"]
        if answers:
            history[answers[seed % len(answers)]] = assistant(text)
            self._turns(session, without_dangling_results(history), seed)

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), text=st.sampled_from(["other", "q"]))
    def begin_anew(self, session: str, seed: int, text: str) -> None:
        self._turns(session, [user(text)], seed)

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), name=st.sampled_from(["t0", "t1"]))
    def change_the_tools(self, session: str, seed: int, name: str) -> None:
        self._turns(session, self.histories[session][-1], seed, tools=[*TOOLS, function_tool(name)])

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999))
    def drop_reasoning_and_rename_ids(self, session: str, seed: int) -> None:
        history = [
            {k: v for k, v in message.items() if k != "reasoning_content"} for message in self.histories[session][-1]
        ]
        self._turns(session, renamed(history, seed), seed)

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999))
    def change_echoes(self, session: str, seed: int) -> None:
        """Send answers with calls back without their text, in pieces, or with their reasoning as text."""
        history = self.histories[session][-1]
        self._turns(session, echoed(history, random.Random(seed)), seed)

    @rule(
        session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), text=st.sampled_from(["It is", "{", " <think>a"])
    )
    def begin_the_answer(self, session: str, seed: int, text: str) -> None:
        self._turns(session, self.histories[session][-1], seed, prefill=text)

    @rule(seed=st.integers(0, 9999), backs=st.tuples(*[st.integers(0, 20)] * 3))
    def ask_several_at_once(self, seed: int, backs: tuple[int, int, int]) -> None:
        drawn = [(name, self._history(name, back)) for name, back in zip(("one", "one", "two"), backs, strict=True)]
        self.engine.chooser.seed(seed)
        self.runner.run(self._gather(drawn))

    @rule(session=st.sampled_from(SESSIONS), seed=st.integers(0, 9999), api=st.sampled_from(["responses", "messages"]))
    def go_on_over_another_api(self, session: str, seed: int, api: str) -> None:
        self.engine.chooser.seed(seed)
        self.runner.run(self._turn_over(api, session, self.histories[session][-1]))

    async def _turn_over(self, api: str, session: str, history: list[Any]) -> None:
        body = as_responses(history) if api == "responses" else as_messages(history)
        response = await self.server.post(f"/{session}/v1/{api}", body)
        assert response.status_code in (200, 502), response.text

    @rule()
    def restart(self) -> None:
        self.runner.run(self.stack.aclose())
        self.server = self.runner.run(self._open())

    @invariant()
    def the_invariants_hold_in_the_store(self) -> None:
        self.runner.run(self._check())

    def _history(self, session: str, back: int) -> list[Any]:
        """The conversation of `back` turns ago. It may differ from run to run, because requests race."""
        histories = self.histories[session]
        return histories[-1 - back % len(histories)]

    async def _check(self) -> None:
        seen: set[str] = set()
        for name in SESSIONS:
            interactions = await self.server.app.state.store.recordings.load_interactions(name)
            exported = await self.server.export(name) if interactions else []
            check_token_exactness(self.engine, interactions)
            check_prefix_truth(self.engine, interactions)
            check_trained_once(exported, interactions)
            check_all_or_nothing(interactions, exported)
            check_isolation(name, interactions, seen)

    def _turns(self, session: str, history: list[Any], seed: int, **more: Any) -> None:
        self.engine.chooser.seed(seed)
        self.runner.run(self._turn(session, history, **more))

    async def _gather(self, drawn: list[tuple[str, list[Any]]]) -> None:
        await asyncio.gather(*(self._turn(name, history) for name, history in drawn))

    async def _turn(
        self, session: str, history: list[Any], *, tools: Any = TOOLS, stream: bool = False, prefill: str = ""
    ) -> None:
        body = {"model": "m", "messages": history, "tools": tools, "stream": stream}
        if prefill:
            body |= {"messages": [*history, assistant(prefill)], "continue_final_message": True}
        response = await self.server.post(f"/{session}/v1/chat/completions", body)
        assert response.status_code in (200, 502), response.text
        if response.status_code != 200 or stream:
            return
        message = response.json()["choices"][0]["message"]
        if prefill:
            message["content"] = prefill + (message["content"] or "")
        results = [tool_result(call["id"], "result") for call in message.get("tool_calls") or []]
        self.histories[session].append([*history, message, *(results or [user(f"next {len(history) % 4}")])])


def echoed(history: list[Any], chooser: random.Random) -> list[Any]:
    """A history whose answers with calls came back changed, as clients change them."""
    out: list[Any] = []
    for message in history:
        calls = message.get("tool_calls") or []
        kind = chooser.choice(["as it was", "dropped", "reasoning", "text first", "calls first", "call by call"])
        text, reasoning = message.get("content"), message.get("reasoning_content") or ""
        if not calls or kind == "as it was":
            out.append(message)
        elif kind in ("dropped", "reasoning"):
            out.append(assistant(None if kind == "dropped" else f"{reasoning}\n{text or ''}", tool_calls=calls))
        elif kind == "call by call":
            out += [assistant(text if at == 0 else None, tool_calls=[call]) for at, call in enumerate(calls)]
        else:
            pieces = [assistant(text), assistant(None, tool_calls=calls)]
            out += pieces if kind == "text first" else reversed(pieces)
    return out


def as_responses(history: list[Any]) -> dict[str, Any]:
    """A chat history as a body of the Responses API."""
    items: list[Any] = []
    for message in history:
        if message["role"] == "tool":
            call_id, text = message["tool_call_id"], message["content"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": text})
            continue
        if message.get("content"):
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls") or []:
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    return {"model": "m", "input": items, "tools": tools}


def as_messages(history: list[Any]) -> dict[str, Any]:
    """A chat history as a body of the Messages API."""
    messages: list[Any] = []
    for message in history:
        blocks: list[Any] = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            block = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
            blocks.append({"type": "tool_use", **block})
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        role = "user" if message["role"] == "tool" else message["role"]
        messages.append({"role": role, "content": blocks})
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in TOOLS)
    ]
    return {"model": "m", "max_tokens": 500, "messages": messages, "tools": tools}


def renamed(history: list[Any], number: int) -> list[Any]:
    """An equal conversation with renamed tool-call ids."""
    out = []
    for message in history:
        copy = dict(message)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [{**call, "id": f"{call['id']}-{number}"} for call in copy["tool_calls"]]
        if copy["role"] == "tool":
            copy["tool_call_id"] = f"{copy['tool_call_id']}-{number}"
        out.append(copy)
    return out


def without_dangling_results(history: list[Any]) -> list[Any]:
    """The messages without results of removed calls."""
    calls = {call["id"] for message in history for call in message.get("tool_calls") or []}
    return [message for message in history if message["role"] != "tool" or message["tool_call_id"] in calls]


class FurtherAgents(AgentMachine):
    """The same moves in more conversations."""


AgentMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=15)
FurtherAgents.TestCase.settings = settings(max_examples=40, stateful_step_count=15)
TestInvariants1And2And3And5And6HoldWhateverTheAgentDoes = AgentMachine.TestCase
TestTheyHoldWhateverFurtherAgentsDo = WIDE(FurtherAgents.TestCase)


def check_token_exactness(engine: RandomEngine, interactions: list[Interaction]) -> None:
    """Invariant 1: the stored token ids are exactly the prompts and outputs of the engine."""
    cache = InteractionCache(interactions)
    for node in cache.nodes.values():
        interaction = node.interaction
        prompt, output = engine.given[interaction.id]
        assert list(token_ids(node)) == prompt + output
        assert interaction.prompt_tokens == len(prompt)
        assert len(interaction.output_ids) == len(interaction.logprobs) == sum(n for n, _ in interaction.versions)


def check_prefix_truth(engine: RandomEngine, interactions: list[Interaction]) -> None:
    """Invariant 2: an aligned prompt begins with exactly the prompt and output of its parent."""
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
    """Invariant 5: a failed call is kept with its status, has no children and is not exported."""
    failed = {i.id for i in interactions if i.status is not Status.COMPLETE}
    assert not failed & {i.parent_id for i in interactions}
    assert not failed & {name for sample in samples for name in sample["interaction_ids"]}
    assert all(i.error for i in interactions if i.id in failed)


def check_isolation(name: str, interactions: list[Interaction], seen: set[str]) -> None:
    """Invariant 6: ids are unique, `seq` has no duplicates, and a parent is an earlier node of the session."""
    order = {i.id: i.seq for i in interactions}
    assert not seen & set(order)
    seen.update(order)
    assert sorted(order.values()) == list(range(len(order)))
    assert all(i.session_id == name for i in interactions)
    assert all(order[i.parent_id] < i.seq for i in interactions if i.parent_id is not None)


def test_invariant_4_no_stream_ends_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another connection holds the write lock, text streams and the end waits for the commit."""
    database = tmp_path / "held.db"
    settings = Settings(port=0, database_url=f"sqlite:///{database}", engine="scripted", log_level="warning")
    body = {"model": "m", "messages": [user("hi")], "stream": True, "max_tokens": 5}
    committing = threading.Event()
    put = Writer._put

    def noticed(writer: Writer, change: Change) -> None:
        put(writer, change)
        if change.write is append_interactions:
            committing.set()

    monkeypatch.setattr(Writer, "_put", noticed)
    with real_server(settings) as url, closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        lines: list[str] = []
        client = threading.Thread(target=read_stream, args=(f"{url}/s/v1/chat/completions", body, lines))
        client.start()
        wait_until(lambda: any('"content":"' in line and '"content":""' not in line for line in lines))
        assert committing.wait(30)
        for _ in range(5):  # each answer arrives after everything that the server sent before it
            assert httpx.get(f"{url}/health").status_code == 200
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


@settings(max_examples=25)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=4), st.floats(0, 1), st.sampled_from(Credit))
def test_invariant_7_rewards_stay_as_set_and_returns_follow_from_them(
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
            interactions = await store.recordings.load_interactions("s")
            assert [i.reward for i in interactions] == rewards
            wanted = compute_returns(interactions, discount, credit)
            assert await store.database.read(reads.load_returns, "s") == {
                (key, discount, credit): value for key, value in wanted.items()
            }

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(scenario(Path(name)))
