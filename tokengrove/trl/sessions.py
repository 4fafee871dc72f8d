"""OpenEnv's sessions for TRL's own worker: an unmodified agent owns its loop, and a Tokengrove session records it.

Creating a session begins an episode, which starts, rewards and ends its session like every other episode. So `verify`
returns the episode's reward, and closing an OpenEnv session leaves nothing behind.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from tokengrove.client import Client
from tokengrove.client.adapters.openenv import trace_entries, training_trace
from tokengrove.client.libraries import library
from tokengrove.client.options import SessionOptions, Train
from tokengrove.client.values import Json
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server
from tokengrove.rollout.executors import Executor, ExecutorOptions, executor_for
from tokengrove.rollout.failure_log import FailureLog
from tokengrove.rollout.session_start import merged_options, unused_session_id
from tokengrove.trl.loop_thread import LoopThread, Running
from tokengrove.trl.outcomes import compared
from tokengrove.trl.specs import Named, NamedAgent, path_of, sampled, spec_of, task_of

_UNPLAYED = ("server", "worker", "cancelled")
"""Failures not caused by the agent: there may be no session."""


class AgentSession:
    """One episode as OpenEnv's `LoopOwningSession` and `TrainableSession`. Methods block; any thread may call them."""

    def __init__(self, client: Client, plan: EpisodePlan, playing: Running[EpisodeResult], train: Train | None) -> None:
        self._client, self._plan, self._playing, self._train = client, plan, playing, train

    @property
    def session_id(self) -> str:
        """The id of the Tokengrove session."""
        return self._plan.session_id

    def initial_messages(self) -> list[Json]:
        """The prompt of the task as messages; [] if the task has no `prompt` of text or messages."""
        prompt = self._plan.task.data.get("prompt")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return list(prompt) if isinstance(prompt, list) else []

    def list_tools(self) -> list[Any]:
        """An empty list: the agent has its own tools."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Json]) -> Any:
        """Raise KeyError: the agent calls its own tools."""
        raise KeyError(f"{name}: the agent of this session owns its loop, and calls its own tools")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait until the agent has ended: 0, or 1 if it failed.

        Raises TimeoutError after the time limit of the episode or after `timeout_s`, when the agent has been ended.
        Raises RuntimeError if nothing was played, if the session was closed, or if too many episodes in a row failed.
        """
        try:
            result = self._playing.result(timeout_s)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"session {self.session_id!r}: the agent has not ended in {timeout_s:g} s") from None
        except CancelledError:
            raise RuntimeError(f"session {self.session_id!r} was closed while its agent ran") from None
        if result.failure == "timeout":
            raise TimeoutError(f"session {self.session_id!r}: {result.message}")
        if result.failure in _UNPLAYED:
            raise RuntimeError(f"session {self.session_id!r}: {result.message}")
        return 0 if result.failure is None else 1

    def fetch_training_trace(self) -> Any:
        """The turns so far as OpenEnv's `TrainingTrace`. Raises ProxyError if the server has no such session."""
        return training_trace(self._client, self.session_id, self._train)

    def fetch_proxy_trace(self) -> list[dict[str, Json]]:
        """The turns so far as OpenEnv's `TraceEntry`s, with the reward if there is one."""
        entries = trace_entries(self._client, self.session_id, self._train)
        result = self._result()
        return [{**entry, "reward": None if result is None else _reward(result)} for entry in entries]

    def verify(self, transcript: Sequence[Json], final_state: Any = None) -> Any:
        """OpenEnv's `VerifyResult`: the reward of the episode; None if it failed or has not ended.

        The transcript is ignored: the reward was computed from the recorded session.
        """
        kind, result = library("openenv.core.harness").VerifyResult, self._result()
        if result is None:
            return kind(artifacts={"session_id": self.session_id})
        counts = {"turns": result.turns, "prompt_tokens": result.prompt_tokens, "output_tokens": result.output_tokens}
        told = {"session_id": result.session_id, "failure": result.failure, "message": result.message}
        return kind(_reward(result), True, {**counts, "seconds": result.seconds, **result.scores}, told)

    def close(self) -> None:
        """End the agent and its session, if they are running, and wait until they have ended. May be called again."""
        self._playing.end()

    def _result(self) -> EpisodeResult | None:
        played = self._playing.done() and self._playing.failure() is None
        return self._playing.result() if played else None


def _reward(result: EpisodeResult) -> float | None:
    return result.reward if compared(result) else None


class SessionFactory:
    """OpenEnv's `ResourceSessionFactory`: `HarnessRolloutWorker(harness_session_factory=partial(SessionFactory, ...))`.

    TRL passes `sampling`, which overrides the sampling of the agent's requests in every turn. `agent` and `reward` are
    functions or classes of modules, or their paths; a list of words is a command. The other arguments are those of
    `AgentWorker`. `train` selects the turns to train, as in an export. After `max_failed_episodes` failed episodes in a
    row `wait_for_completion` raises TooManyFailedEpisodes (default: three groups of the largest group's size; -1: no
    limit).
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        agent: NamedAgent,
        reward: Named | None = None,
        arguments: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Json] | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
        options: SessionOptions | None = None,
        executor: ExecutorOptions | None = None,
        train: Train | None = None,
        max_failed_episodes: int | None = None,
    ) -> None:
        self._server, self._client = Server(url, admin_key), Client(url, admin_key)
        self._agent: AgentSpec = spec_of(agent, arguments)
        self._reward = None if reward is None else path_of(reward)
        self._options, self._train = sampled(options or {}, sampling), train
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._executor: Executor = executor_for(executor or ExecutorOptions(), url)
        self._loop = LoopThread("tokengrove-openenv")
        self.failures = FailureLog(max_failed_episodes)
        self._latest, self._of_latest = -1, 0
        self._run = f"openenv-{secrets.token_hex(4)}"

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> AgentSession:
        """Begin an episode. `task`: a prompt (text or messages), or a row of data. Equal seeds are a group."""
        played = task_of(task, self._run if seed is None else f"task-{seed}")
        options = merged_options(self._options, played.options)
        if seed is not None:
            options["group_id"] = f"{self._run}-{seed}"
            self._latest, self._of_latest = seed, self._of_latest + 1 if seed == self._latest else 1
            self.failures.set_most(None, self._of_latest)
        plan = EpisodePlan(
            task=played,
            sample=0,
            attempt=0,
            server=self._server,
            agent=self._agent,
            session_id=unused_session_id(episode_id or self._run),
            seed=seed or 0,
            timeout_s=self._timeout_s,
            start_timeout_s=self._start_timeout_s,
            reward=self._reward,
            options=options,
        )
        return AgentSession(self._client, plan, self._loop.submit(self._play(plan)), self._train)

    async def _play(self, plan: EpisodePlan) -> EpisodeResult:
        result = await self._executor.play(plan)
        if result.failure != "cancelled":
            self.failures.note(None if compared(result) else result.failed)
        return result

    def close(self) -> None:
        """End all running episodes. Afterwards their sessions cannot be read. May be called again."""
        if not self._loop.closed:
            self._loop.submit(self._executor.close()).result()
        self._loop.close()
        self._client.close()
