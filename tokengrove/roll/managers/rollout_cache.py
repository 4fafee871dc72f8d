"""The state of a manager's running episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RolloutCache:
    """The episode of an environment so far; `step` counts its complete steps.

    `history` has an entry for each observation. It begins with `observation`, `actions_left` and the environment's
    `info`. A decision adds `messages` (those of this step, its answer last), `prompt_ids`, `response_ids`,
    `infer_logprobs`, `state_hash` and `interaction_id` (of the turn). The step adds `llm_response`, `reward` and the
    environment's `info`, such as `metrics`. The last entry is an observation that has not been answered.
    """

    env_id: int
    group_id: int
    tag: str
    history: list[dict[str, Any]] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)
    truncated: bool = False
    terminated: bool = False
    step: int = 0
