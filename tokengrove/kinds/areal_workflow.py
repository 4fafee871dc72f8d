"""AReaL's workflows: `arun_episode(engine, data)`, with an engine that samples in the session of the episode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import fsum
from typing import Any

import numpy as np

from tokengrove.areal import GroupedRolloutWorkflow, OpenAIProxyWorkflow
from tokengrove.areal.model_response import ModelResponse
from tokengrove.client import AsyncClient, AsyncSession
from tokengrove.client.image_urls import image_url
from tokengrove.client.options import GenerateOptions
from tokengrove.errors import InvalidRequest
from tokengrove.kinds.areal_agent import ArealAgent
from tokengrove.rollout.episodes import Agent, Episode, EpisodeEnded
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.agent_access import session_fields
from tokengrove.rollout.named_arguments import check_construction

_SAMPLING = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
"""The fields of AReaL's GenerationHyperparameters that apply to a session."""
_NO_TOP_K = 10**8
"""AReaL's default, which excludes no token."""


def workflow_agent(found: Any, arguments: Mapping[str, Any], name: str) -> Agent:
    """The agent of a workflow, given as a class with its arguments or as an instance.

    For an OpenAIProxyWorkflow, its own agent plays in the session of the episode. Raises InvalidRequest for a workflow
    that runs groups, or that has no agent because it waits for external ones.
    """
    if isinstance(found, type):
        check_construction(found, arguments, name)
        found = found(**arguments)
    elif arguments:
        raise InvalidRequest(f"{name} is already an instance, so it takes no arguments", param=min(arguments))
    if isinstance(found, GroupedRolloutWorkflow):
        raise InvalidRequest(f"{name} runs groups; name the workflow inside, and give a group size", param="agent")
    if isinstance(found, OpenAIProxyWorkflow) and type(found).arun_episode is OpenAIProxyWorkflow.arun_episode:
        if found.agent is None:
            raise InvalidRequest(f"{name} runs no agent (mode 'online'), so there is nothing to play", param="agent")
        return ArealAgent(found.agent, {}, name)
    return WorkflowAgent(found, name)


class WorkflowAgent:
    """Runs `arun_episode` for each episode. The engine's `agenerate` samples a turn of the session.

    All episodes share the workflow. Only the rewards in its result are used: the turns are in the session.
    """

    def __init__(self, workflow: Any, name: str) -> None:
        self._workflow, self.name = workflow, name

    async def play(self, episode: Episode) -> Reward:
        """Run the workflow. Raises EpisodeEnded (NoData) if it rejects the episode, and the workflow's errors."""
        client = AsyncClient(None if episode.client.app else episode.client.url, app=episode.client.app)
        async with client:
            engine = SessionEngine(client, episode)
            result = await self._workflow.arun_episode(engine, dict(episode.task.data))
        if result is None:
            raise EpisodeEnded("NoData", f"{self.name} returned None: the episode is not to be trained")
        return _rewards(result, engine.interaction_ids, self.name)

    async def close(self) -> None:
        """Do nothing: a workflow has no resources."""


class SessionEngine:
    """The engine of a workflow: each `agenerate` is a turn of one session. It has no control key.

    `interaction_ids`: the ids of its turns.
    """

    def __init__(self, client: AsyncClient, episode: Episode) -> None:
        self._session = AsyncSession(client, session_fields(episode))
        self._sampling = episode.plan.options.get("sampling", {})
        self._version = 0
        self.interaction_ids: list[str] = []

    async def agenerate(self, req: Any) -> ModelResponse:
        """Sample from `req.input_ids` with `req.gconfig`. The session's own sampling takes precedence.

        `req.image_data`: the images of the prompt, in base64 or as URLs.
        """
        begun, params = time.monotonic(), _sampling(getattr(req, "gconfig", None))
        params = {name: value for name, value in params.items() if name not in self._sampling}
        images = list(getattr(req, "image_data", None) or ())
        options: GenerateOptions = {"sampling_params": params}
        if images:
            options["image_data"] = [image_url(image) for image in images]
        answer = await self._session.generate(list(req.input_ids), **options)
        self.interaction_ids.append(answer.id)
        self._version = max([self._version, *answer.versions])
        took = time.monotonic() - begun
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=answer.output_ids,
            output_logprobs=answer.logprobs or [0.0] * len(answer.output_ids),
            output_versions=answer.versions,
            stop_reason=answer.finish_reason or "stop",
            input_images=images,
            latency=took,
            ttft=took,
        )

    def get_version(self) -> int:
        """The newest weight version of the answers; 0 before the first answer."""
        return self._version


def _sampling(gconfig: Any) -> dict[str, Any]:
    """The sampling fields that are set."""
    found = {name: getattr(gconfig, name, None) for name in _SAMPLING}
    if getattr(gconfig, "greedy", False):
        found["temperature"] = 0.0
    if (found["top_k"] or 0) >= _NO_TOP_K:
        del found["top_k"]
    kept = {name: value for name, value in found.items() if value or name == "temperature"}
    return {name: value for name, value in kept.items() if value is not None}


def _rewards(result: Any, interaction_ids: list[str], name: str) -> Reward:
    """The rewards of interactions by id, or of the column `rewards` of a batch: one for all turns, or one per turn."""
    if not isinstance(result, Mapping):
        raise TypeError(f"{name} returned {type(result).__name__!r}; a workflow returns a dict of tensors or None")
    if result and all(hasattr(value, "model_response") for value in result.values()):
        told = {key: getattr(value, "original_reward", None) for key, value in result.items()}
        return {key: reward for key, reward in told.items() if reward is not None}
    if "rewards" not in result:
        return None
    column = [float(value) for value in np.asarray(result["rewards"], dtype=np.float64).reshape(-1)]
    if len(column) == len(interaction_ids):
        return dict(zip(interaction_ids, column, strict=True))
    if len(column) == 1:
        return column[0]
    raise ValueError(f"{name} returned {len(column)} rewards for {len(interaction_ids)} turns: {fsum(column)} in all")
