"""The contract between an agent's harness and a trainer, as OpenEnv's draft of it is printed: interfaces only.

This file needs nothing but the standard library, so that it can be copied into a trainer or an environment as it is.
There are two seams. The trainer implements `GenerateAPI`: it samples, and keeps the token ids and logprobs by
`(rollout_id, turn)`. A worker plays an `AgentSession` with it and emits `RolloutMessages`, which the trainer joins with
the tokens that it kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class RolloutMessages:
    """One rollout at the level of messages: the conversation in the form of chat completions, and its reward.

    `reward` is the environment's; None: it gave none.
    """

    rollout_id: str
    messages: list[dict[str, Any]]
    reward: float | None


class GenerateAPI(Protocol):
    """The trainer's side of a turn: where messages become tokens."""

    def generate(
        self,
        rollout_id: str,
        turn: int,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        sampling: dict[str, Any],
    ) -> str:
        """Generate one assistant turn. The trainer records token_ids + logprobs keyed by
        (rollout_id, turn) and returns the completion text."""
        ...


class AgentSession(Protocol):
    """One agent at work on one task. The agent owns its loop; its calls of the model are held,
    and answered by `deliver`.
    """

    def next_request(self) -> dict[str, Any] | None:
        """Intercepted agent LLM call ({messages, tools, request_id}), or None when the agent exits."""
        ...

    def deliver(self, intercept: dict[str, Any], completion_text: str) -> None:
        """Answer a call that `next_request` returned with what the model has written, calls in their markup."""
        ...

    def verify(self) -> Any:
        """Score the episode; return an object with .env_reward (the reward stays in the environment)."""
        ...

    def close(self) -> None:
        """End the agent, if it still runs, and release what the session holds. It may be called twice."""
        ...


class AgentSessionFactory(Protocol):
    """Makes a session for each rollout."""

    def create(self, *, task: Any, rollout_id: str) -> AgentSession:
        """Start an agent on `task`."""
        ...
