"""Agents of every kind, that tests name by their paths."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import gem

from tests.unit.tokengrove.rollout.episode_agents import ask
from tokengrove.areal import OpenAIProxyWorkflow
from tokengrove.client import AsyncClient
from tokengrove.roll.runners import AgentRunner
from tokengrove.roll.values import EpisodeResult
from tokengrove.rollout.episodes import Episode
from tokengrove.verl import AgentLoopBase, AgentLoopOutput


class Calling:
    """A class whose instances are called."""

    def __init__(self, reward: float) -> None:
        self._reward = reward

    async def __call__(self, task: Mapping[str, Any], base_url: str, http_client: Any) -> float:
        await ask(base_url, http_client, task["question"])
        return self._reward


class Playing:
    """A class that plays episodes itself."""

    closed = 0

    async def play(self, episode: Episode) -> float:
        async with episode.client.http_client() as http:
            await ask(episode.session.base_url, http)
        return 1.0

    async def close(self) -> None:
        Playing.closed += 1


class Unclosable(Playing):
    """Its `close` is a plain function that fails."""

    def close(self) -> None:  # type: ignore[override]
        raise OSError("the socket is gone")


class Areal:
    """An agent as AReaL has it."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    async def run(self, data: dict[str, Any], **extra: Any) -> dict[str, float]:
        assert extra["base_url"].endswith("/v1") is False
        return {await ask(f"{extra['base_url']}/v1", extra["http_client"], data["question"]): self._scale}


proxied = OpenAIProxyWorkflow(agent=Areal(0.75), proxy_addr="http://127.0.0.1:9")


class Workflow:
    """A workflow that samples tokens from the engine, as AReaL's RLVRWorkflow does."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        if data["question"] == "":
            return None
        gconfig = SimpleNamespace(max_new_tokens=8, temperature=1.0, top_k=10**8, stop=None, greedy=False)
        response = await engine.agenerate(SimpleNamespace(input_ids=[5, 6, 7], gconfig=gconfig, rid="r"))
        assert response.output_len == len(response.output_logprobs) == len(response.output_versions)
        return {"input_ids": [response.input_tokens + response.output_tokens], "rewards": [0.5]}


class Loop(AgentLoopBase):
    """An agent loop of verl, in the printed form."""

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, bonus: float = 0.0) -> None:
        cls.bonus = bonus  # type: ignore[attr-defined]

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        prompt = await self.build_prompt(messages)
        answer = await self.server_manager.generate(request_id="r", prompt_ids=prompt, sampling_params=sampling_params)
        ids = list(answer)
        return AgentLoopOutput(prompt, ids, [1] * len(ids), num_turns=2, reward_score=1.0 + self.bonus)  # type: ignore[attr-defined]


class Runner(AgentRunner):
    """A runner of ROLL's. `then` says how its episodes go."""

    counts: Mapping[str, int] = {}
    modes: Sequence[str] = ()
    hanging = threading.Event()
    released = threading.Event()

    def setup(self) -> None:
        self._count("setup")

    def teardown(self) -> None:
        self._count("teardown")

    def run_job(self, seed: int) -> EpisodeResult:
        Runner.modes = [*Runner.modes, self.mode]
        for step in range(2):
            self._llm_request(None, [{"role": "user", "content": f"seed {seed}, step {step}"}])
        match self.env_params.get("then"):
            case "hang":
                self.hanging.set()
                self.released.wait()
            case "fail":
                return EpisodeResult("Failed", 0.25, [0.25], "a wall")
            case "nothing":
                return EpisodeResult("NoData", 0.0)
            case "disagree":
                return EpisodeResult("Finished", 5.0, [1.0, 2.0], metrics={"pass_rate": 0.25})
        return EpisodeResult("Finished", 0.75, [0.5, 0.25], metrics={"seed": seed})

    def _count(self, what: str) -> None:
        Runner.counts = {**Runner.counts, what: Runner.counts.get(what, 0) + 1}


class Talk(gem.Env):  # type: ignore[misc]
    """An environment of gem that ends with the word oak."""

    def __init__(self, bonus: float = 0.0) -> None:
        self._bonus = bonus

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"Name a tree. Seed {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "Another one.", 0.5 + self._bonus, action == "oak", False, {}


class Sessions:
    """A factory of OpenEnv's contract: the agent asks once, and its reward is the length of the answer."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def create(self, *, task: Any, rollout_id: str) -> Any:
        return OneQuestion(task, self._scale)


class OneQuestion:
    """The session of a rollout."""

    def __init__(self, task: Any, scale: float) -> None:
        self._task, self._scale, self._answer = task, scale, ""

    def next_request(self) -> dict[str, Any] | None:
        if self._answer:
            return None
        return {"messages": [{"role": "user", "content": self._task["question"]}], "tools": None, "request_id": "r"}

    def deliver(self, intercept: dict[str, Any], completion_text: str) -> None:
        self._answer = completion_text

    def verify(self) -> Any:
        return SimpleNamespace(env_reward=self._scale * ("oak" in self._answer))

    def close(self) -> None: ...


class OfOpenEnv:
    """An environment of openenv, by the module of its class."""

    def reset(self) -> None: ...
    def step(self, action: Any) -> None: ...


OfOpenEnv.__module__ = "openenv.core"


class Factory:
    """No agent: it has none of the methods of one."""


async def unkeyed(client: AsyncClient) -> None:
    """No agent either."""
