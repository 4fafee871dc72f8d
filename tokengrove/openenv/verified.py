"""The result of a session's `verify`, and its reward. A score that cannot be read is an error, never no reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokengrove.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Verified:
    """A score and the environment's metrics. `env_reward` None: it gave no reward."""

    env_reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def verified_of(found: Any) -> Any:
    """The result of a scoring function as an object with `env_reward`: a number or None is the reward itself."""
    return Verified(found) if found is None or isinstance(found, int | float) else found


def reward_of(verified: Any) -> float | None:
    """The reward in the result of `verify`. Raises InvalidRequest if it cannot be read."""
    if not hasattr(verified, "env_reward"):
        raise InvalidRequest(
            f"verify() must return an object with 'env_reward', not {type(verified).__name__!r}", param="env_reward"
        )
    reward = verified.env_reward
    if reward is None:
        return None
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise InvalidRequest(f"'env_reward' must be a number or None, not {reward!r}", param="env_reward") from None
