"""What a manager knows of its running episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RolloutCache:
    """The episode of an environment so far; `step` counts its complete steps.

    `history` has an entry for each observation. It begins with `observation`, `actions_left` and what the environment
    said in its `info`. A decision adds `messages` (those of this step, its answer last), `prompt_ids`, `response_ids`,
    `infer_logprobs`, `state_hash` and `interaction_id` (the turn's); the step adds `llm_response`, `reward` and
    the environment's `info`, such as `metrics`. The last entry is an observation that nothing has answered yet.
    """

    env_id: int
    group_id: int
    tag: str
    history: list[dict[str, Any]] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)
    truncated: bool = False
    terminated: bool = False
    step: int = 0
