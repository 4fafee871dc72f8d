"""Random agents, drawn by a seed, that fork, compact, retry, rewrite, use tools, fail and are rewarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Fault, Reply, Script
from proxy.types import Logprobs as Floats
from tests.support import Server, assistant, call_text, function_tool, sampled, system, tool_result, user
from tokengrove.reasons import LogprobsOf

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
OUTCOMES = ("Finished", "Finished", "Failed", "Timeout", None)
REWARDS = (0, 1, -1, 0.5, 1.25, -3.7, 0.001, 12345.678)
TOOLS = [function_tool("add", {"a": {"type": "integer"}})]
SAMPLING: list[dict[str, Any]] = [
    *({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"top_k": -1, "temperature": 0.5}, {"logit_bias": {"5": 1}}),
    *({"presence_penalty": 0.5, "top_p": 0.9}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}),
]
_ODD = {0: LogprobsOf.SAMPLED, 1: LogprobsOf.MODEL}
AGENTS, PURPOSES, STATES = ("red", "blue"), ("main", "summary", "aux"), ("here", "there")


@dataclass(frozen=True)
class Said:
    """One request of an engine: its prompt, and its output with logprobs, what they are of, and weight versions."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    logprobs_of: list[LogprobsOf] = field(default_factory=list)


class VariedEngine(ScriptedEngine):
    """Gives every token another logprob, and some chunks another `logprobs_of`; with `restless`, weights change in the
    middle of replies."""

    def __init__(self, script: Script, *, vocab_size: int, restless: Random | None = None) -> None:
        super().__init__(script, vocab_size=vocab_size)
        self.said: list[Said] = []
        self._restless = restless

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        said = Said(list(request.input_ids))
        self.said.append(said)
        async for chunk in super().generate(request):
            said.output.extend(chunk.ids)
            values = Floats("f", (-1.0 / (3 + (token + 7 * len(said.output)) % 101) for token in chunk.ids))
            values = values[: len(chunk.logprobs)]
            said.logprobs.extend(values)
            said.versions.extend([chunk.version] * len(chunk.ids))
            said.logprobs_of.append(_ODD.get((len(said.prompt) + len(said.output)) % 16, LogprobsOf.RULE))
            yield replace(chunk, logprobs=values, logprobs_of=said.logprobs_of[-1])
            if self._restless is not None and self._restless.random() < 0.1:
                await self.update_weights("anywhere")


def words(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 4)))


def varied(random: Random, *, thinks: bool) -> Script:
    """A script of answers, tool calls, answers truncated by length, and failures."""

    def script(request: GenerateRequest) -> Reply:
        chance, chunk = random.random(), random.randint(1, 5)
        thought = f"<think>\n{words(random)}\n</think>\n\n" if thinks and random.random() < 0.5 else ""
        if chance < 0.06:
            fault = random.choice([Fault.ERROR, Fault.CUT, Fault.BAD_LENGTHS])
            return Reply(sampled(words(random)), chunk, fault=fault, fault_after=chunk)
        if request.grammar is not None:
            forced = request.turn is not None and bool(request.turn.tools)
            return Reply(sampled(call_text("add", '{"a": 7}') if forced else '{"b": 1}'), chunk)
        if chance < 0.14:
            return Reply(sampled(words(random), end=False), chunk)
        if request.turn is not None and request.turn.tools and chance < 0.6:
            return Reply(sampled(thought + call_text("add", f'{{"a": {random.randint(0, 9)}}}')), chunk)
        return Reply(sampled(thought + words(random)), chunk)

    return script


@dataclass
class Agent:
    """The agent of one session. `histories`: the conversations that it may continue, each ending with an answer."""

    server: Server
    random: Random
    session: str
    tools: bool
    histories: list[list[Any]] = field(default_factory=list)

    async def live(self, steps: int) -> None:
        for _ in range(steps):
            ways = [Agent.begin] if not self.histories else _WAYS
            await self.random.choice(ways)(self)

    async def begin(self) -> None:
        """Begin a separate conversation: a sub-agent's, or the rest of a compacted one."""
        head = [system(f"you are {words(self.random)}")] if self.random.random() < 0.5 else []
        await self.say([*head, user(words(self.random))])

    async def go_on(self) -> None:
        history = self.random.choice(self.histories)
        await self.say([*history, *self.next_words(history)])

    async def fork(self) -> None:
        """Continue from an earlier answer."""
        history = self.random.choice(self.histories)
        ends = [at + 1 for at, message in enumerate(history) if message["role"] == "assistant"]
        above = history[: self.random.choice(ends)]
        await self.say([*above, *self.next_words(above)])

    async def ask_again(self) -> None:
        await self.say(self.random.choice(self.histories)[:-1])

    async def rewrite(self) -> None:
        """Replace an answer of the engine by another text."""
        history = list(self.random.choice(self.histories))
        places = [at for at, message in enumerate(history) if message["role"] == "assistant"]
        at = self.random.choice(places)
        await self.say([*history[:at], assistant(f"no, {words(self.random)}"), user(words(self.random))])

    async def compact(self) -> None:
        await self.say([system("go on from a summary"), user(f"so far: {words(self.random)}")])

    async def ask_at_once(self) -> None:
        history = self.random.choice(self.histories)
        await asyncio.gather(*(self.say([*history, *self.next_words(history)]) for _ in range(2)))

    def next_words(self, history: list[Any]) -> list[Any]:
        calls = history[-1].get("tool_calls") or []
        results = [tool_result(call["id"], words(self.random)) for call in calls]
        return results or [user(words(self.random))]

    async def say(self, messages: list[Any]) -> None:
        """Run a turn. Its marked retry gets the same reply, or a new one after a failure."""
        body: dict[str, Any] = {"model": "m", "messages": messages}
        if self.tools:
            body["tools"] = TOOLS
        if self.random.random() < 0.1:
            body["n"] = 2
        if self.random.random() < 0.2:
            body |= {"tool_choice": "required"} if self.tools else {"response_format": {"type": "json_object"}}
        body |= self.random.choice(SAMPLING) if self.random.random() < 0.3 else {}
        headers = {
            "x-tokengrove-agent": self.random.choice(AGENTS),
            "x-tokengrove-purpose": self.random.choice(PURPOSES),
        }
        if self.random.random() < 0.7:
            headers["x-tokengrove-state-hash"] = self.random.choice(STATES)
        path, retry = f"/{self.session}/v1/chat/completions", {"x-stainless-retry-count": "1"}
        response = await self.server.post(path, body, headers=headers)
        if self.random.random() < 0.3:
            again = await self.server.post(path, body, headers={**headers, **retry})
            if response.status_code == 200:
                assert again.json()["id"] == response.json()["id"]
            response = again
        if response.status_code == 200:
            self.histories += [[*messages, choice["message"]] for choice in response.json()["choices"]]
        else:
            assert response.status_code == 502, response.text

    async def reward(self, times: int) -> None:
        """Set rewards and marks of every kind on random complete turns."""
        for _ in range(times):
            turns = [node for node in await self.server.tree(self.session) if node["status"] == "complete"]
            if turns:
                path, body = self.draw_reward(turns)
                await self.server.ok(f"/{self.session}/rl/{path}", body)

    def draw_reward(self, turns: list[Any]) -> tuple[str, dict[str, Any]]:
        turn, number = self.random.choice(turns), lambda: self.random.choice(REWARDS)
        name, length = turn["id"], turn["output_tokens"]
        last = {} if any(turn["purpose"] == "main" for turn in turns) else {"turn": 0}
        start = self.random.randrange(length)
        spans = [[start, self.random.randint(start + 1, length)], [0, 1]]
        return self.random.choice(
            [
                ("set_reward", {"reward": number(), **last}),
                ("set_reward", {"reward": number(), "interaction_id": name}),
                ("set_reward", {"rewards": {each["id"]: number() for each in turns[::2]}}),
                ("set_reward", {"step_scores": [number() for _ in turns]}),
                ("set_reward", {"reward": number(), "name": self.random.choice(["pass_rate", "style"]), **last}),
                ("set_reward", {"reward": number(), "name": "pass_rate", "interaction_id": name}),
                ("set_reward", {"interaction_id": name, "token_rewards": [number() for _ in range(length)]}),
                ("mark", {"interaction_id": name, "trainable": False}),
                ("mark", {"interaction_id": name, "trainable": True, "spans": spans[: self.random.randint(1, 2)]}),
                ("mark", {"interaction_id": name, "trainable": True}),
            ]
        )

    async def end(self) -> None:
        """End the session, or leave it running."""
        if self.random.random() < 0.8:
            outcome = {"finished": self.random.choice([True, False, None]), "outcome": self.random.choice(OUTCOMES)}
            named = self.random.sample(["m", "pass_rate", "binary", "style"], self.random.randrange(3))
            metrics = {name: self.random.randrange(5) / 4 for name in named}
            await self.server.ok(f"/{self.session}/rl/end_session", {**outcome, "metrics": metrics})


_WAYS = [
    Agent.begin,
    *[Agent.go_on] * 7,
    Agent.fork,
    Agent.ask_again,
    Agent.rewrite,
    Agent.compact,
    Agent.ask_at_once,
]


async def wander(server: Server, random: Random, sessions: int) -> None:
    """Run sessions in groups, with different discounts and credit rules; the last session has no turn."""
    for number in range(sessions):
        name = f"s{number}"
        start = {
            "session_id": name,
            "task_id": "task",
            "group_id": random.choice(["g1", "g2", None]),
            "discount": random.choice([0.0, 0.5, 0.9, 1.0, None]),
            "credit": random.choice(["tree", "linear", None]),
        }
        await server.ok("/rl/start_session", start)
        agent = Agent(server, random, name, tools=random.random() < 0.5)
        await agent.live(0 if number == sessions - 1 else random.randint(2, 14))
        await agent.reward(random.randint(0, 4))
        await agent.end()
        await agent.reward(random.randint(0, 1))
