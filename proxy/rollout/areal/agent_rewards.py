"""What an agent may return: a reward of its last turn, rewards by interaction, or nothing."""

from __future__ import annotations

from math import isfinite
from numbers import Real
from typing import Any


def agent_rewards(result: Any, agent: object) -> float | dict[str, float] | None:
    """Return the rewards in what `agent` returned. Booleans count as 0 and 1; scalars of numpy and torch as numbers.

    Raises TypeError for another type, and ValueError for a reward that is not finite; both name the agent.
    """
    who = f"{type(agent).__name__}.run"
    if result is None:
        return None
    if isinstance(result, dict):
        return {
            _interaction_id(name, who): _number(value, f"{who} returned a dict in which {name!r} has the reward")
            for name, value in result.items()
        }
    return _number(result, f"{who} returned")


def _interaction_id(name: Any, who: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{who} returned a dict with the key {name!r}; its keys are the ids of interactions")
    return name


def _number(value: Any, told: str) -> float:
    """`told`: the sentence that `value` ends."""
    if getattr(value, "ndim", None) == 0:  # a scalar array or tensor
        value = value.item()
    if not isinstance(value, Real):
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
        raise TypeError(
            f"{told} {shown} of type {type(value).__name__}; return a float (the reward of the last turn), a "
            "dict of rewards by interaction id, or None"
        )
    if not isfinite(value):
        raise ValueError(f"{told} {value!r}; a reward must be a finite number")
    return float(value)
