"""The contract between an agent's harness and a trainer, as in OpenEnv's draft: interfaces only.

This file imports only the standard library, so it can be copied unchanged into a trainer or an environment. The trainer
implements `GenerateAPI`: it samples, and stores token ids and logprobs by `(rollout_id, turn)`. A worker plays an
`AgentSession` with it and emits `RolloutMessages`, which the trainer joins with the stored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class RolloutMessages:
    """One rollout as messages: the conversation in the format of chat completions, and its reward.

    `reward`: the environment's reward; None: the environment set none.
    """

    rollout_id: str
    messages: list[dict[str, Any]]
    reward: float | None


class GenerateAPI(Protocol):
    """The trainer's side of a turn: it turns messages into tokens."""

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
    """One agent that works on one task.

    The agent runs its own loop. Its model calls are intercepted and wait until `deliver` answers them.
    """

    def next_request(self) -> dict[str, Any] | None:
        """Intercepted agent LLM call ({messages, tools, request_id}), or None when the agent exits."""
        ...

    def deliver(self, intercept: dict[str, Any], completion_text: str) -> None:
        """Answer a call that `next_request` returned with the model's text, which includes tool calls in its markup."""
        ...

    def verify(self) -> Any:
        """Score the episode; return an object with .env_reward (the reward stays in the environment)."""
        ...

    def close(self) -> None:
        """End the agent if it still runs, and release the session's resources. May be called twice."""
        ...


class AgentSessionFactory(Protocol):
    """Creates a session for each rollout."""

    def create(self, *, task: Any, rollout_id: str) -> AgentSession:
        """Start an agent on `task`."""
        ...
