"""Runners for environments of gem: one whose actions are texts, and one whose actions are tool calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import httpx

from tokengrove.client.certificates import trusted
from tokengrove.errors import InvalidRequest
from tokengrove.roll.runners.agent_runner import AgentRunner
from tokengrove.roll.runners.environments import close, make_environment
from tokengrove.roll.runners.played import ended_by
from tokengrove.roll.values import EpisodeResult, aggregate_metrics, env_step_limit, rendered


class GEMRunner(AgentRunner):
    """Plays an environment of gem whose observations and actions are texts.

    It reads these settings of `env_config`: `env_type`, `config` (the parameters of the environment), `max_steps`
    (default 10), `max_tokens_per_step` (default 128; shown to the model, while the session limits the tokens),
    `agent_system_template`, `agent_template`, `tool_wrapper`, `use_thread_lock` and `max_env_step_concurrent`. The
    system message also has `info["env_instruction"]`, if the environment returns one. Fields of `agent_template` are
    `observation`, `turn_idx` (from 1), `actions_left`, `max_response_length`, and `suffix`, which is `info["suffix"]`:
    text in addition to the observation, such as the board of a game.

    The environment's `metrics` become those of the result, aggregated by its `metrics_agg_mode`. An exception of the
    environment or of a request ends the episode, and the result keeps the rewards (see `played`).
    """

    def __init__(self, base_url: str, env_id: int, env_config: Any, **kwargs: Any) -> None:
        super().__init__(base_url, env_id, env_config, **kwargs)
        self.logger = logging.getLogger(__name__)
        self.system_template: str = self.env_config.get("agent_system_template") or ""
        self.agent_template: str = self.env_config.get("agent_template") or "{observation}"
        self._suffix = ""
        GEMRunner._render_observation(self, "", 1, 1)  # report an unknown field now, and not in each episode
        self._metrics: list[Mapping[str, Any]] = []
        self._modes: dict[str, str] = {}
        self.setup()

    def setup(self) -> None:
        """Create the environment."""
        self.env = make_environment(self.env_config, self.env_params)

    def teardown(self) -> None:
        """Close the environment."""
        env, self.env = self.env, None
        if env is not None:
            close(env)

    def run_job(self, seed: int) -> EpisodeResult:
        """Play the episode of `seed`; NoData if the environment has none (its observation is None)."""
        self._metrics, self._modes = [], {}
        try:
            with env_step_limit(self.env_config, self.mode):
                observation, info = self.env.reset(seed=seed)
            if observation is None:
                return EpisodeResult("NoData", 0.0)
            with self._client() as client:
                self._play(client, observation, dict(info or {}))
        except Exception as error:
            result = ended_by(error, self.step_scores)
        else:
            result = EpisodeResult("Finished", float(sum(self.step_scores)), self.step_scores)
        result.metrics = {**aggregate_metrics(self._metrics, self._modes), **result.metrics}
        return result

    def _play(self, client: Any, observation: Any, info: dict[str, Any]) -> None:
        if not isinstance(observation, str):
            raise InvalidRequest("the environment's observations are not texts; use ToolCallRunner for messages")
        instruction = info.get("env_instruction") or ""
        system = "\n\n".join(text for text in (self.system_template, instruction) if text)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for turn in range(1, self.max_steps + 1):
            self._suffix = info.get("suffix") or ""
            rendered = self._render_observation(observation, turn, self.max_steps - turn + 1)
            messages.append({"role": "user", "content": rendered})
            message = _message(self._llm_request(client, messages))
            messages.append(message)
            observation, info, done = self._step(_whole_text(message))
            if done:
                break

    def _render_observation(self, obs_text: str, turn_idx: int, actions_left: int) -> str:
        """The user message for an observation."""
        fields = {
            "observation": obs_text,
            "turn_idx": turn_idx,
            "suffix": self._suffix,
            "actions_left": actions_left,
            "max_response_length": self.env_config.get("max_tokens_per_step") or 128,
        }
        return rendered(self.agent_template, fields)

    def _step(self, action: Any) -> tuple[Any, dict[str, Any], bool]:
        """Take a step of the environment; return its observation, its info, and whether the episode is over."""
        with env_step_limit(self.env_config, self.mode):
            observation, reward, terminated, truncated, info = self.env.step(action)
        self.step_scores.append(float(reward))
        info = dict(info or {})
        self._metrics.append(info.get("metrics") or {})
        self._modes.update(info.get("metrics_agg_mode") or {})
        return observation, info, bool(terminated or truncated)

    def _client(self) -> AbstractContextManager[Any]:
        if self.http_client is not None:
            return nullcontext(self.http_client)
        return httpx.Client(timeout=self.http_timeout, verify=trusted(httpx))


class ToolCallRunner(GEMRunner):
    """Plays an environment of gem whose observations are conversations and whose actions may be tool calls.

    `env.reset` and `env.step` return the messages to send, so the environment owns the history; `info["tools"]` of the
    reset are the tools. The action for an answer with tool calls is the whole message, for other answers the text. The
    templates of GEMRunner are not used.
    """

    def _play(self, client: Any, observation: Any, info: dict[str, Any]) -> None:
        tools, messages = info.get("tools") or None, observation
        for _ in range(self.max_steps):
            if not isinstance(messages, list):
                raise InvalidRequest("the environment's observations are no lists of messages; use GEMRunner for texts")
            message = _message(self._llm_request(client, messages, tools=tools))
            messages, _, done = self._step(message if message.get("tool_calls") else _whole_text(message))
            if done:
                break


def _message(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant message, without fields that are null."""
    if not completion.get("choices"):
        raise InvalidRequest(f"the server's answer has no choices: {str(completion)[:500]}")
    message = completion["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _whole_text(message: Mapping[str, Any]) -> str:
    """The output of the model, with its reasoning in the tags that patterns of actions expect."""
    text = message.get("content") or ""
    if not (reasoning := message.get("reasoning_content")):
        return text
    return f"<think>\n{reasoning}\n</think>\n\n{text}" if text else f"<think>\n{reasoning}"
