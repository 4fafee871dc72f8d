"""The rewards of an environment while an agent runs, recorded from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from numbers import Real
from typing import Any


@contextmanager
def step_rewards(env: Any) -> Iterator[list[float]]:
    """A list of the rewards of each `env.step` within the block: the second of its four or five values.

    An environment without a `step` of its class, or whose attributes cannot be set, is not recorded.
    """
    rewards: list[float] = []
    attributes, step = getattr(env, "__dict__", None), getattr(env, "step", None)
    if type(attributes) is not dict or not callable(step) or "step" in attributes:
        yield rewards
        return
    attributes["step"] = _noting(step, rewards)
    try:
        yield rewards
    finally:
        attributes.pop("step", None)


def _noting(step: Callable[..., Any], rewards: list[float]) -> Callable[..., Any]:
    @wraps(step)
    def noting(*arguments: Any, **more: Any) -> Any:
        result = step(*arguments, **more)
        if isinstance(result, tuple) and len(result) in (4, 5) and isinstance(result[1], Real):
            rewards.append(float(result[1]))
        return result

    return noting
