"""The values that an agent or reward function may return: the last turn's reward, rewards by interaction, or None."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from numbers import Real
from typing import Any

_MAIN = ("reward", "score")


def returned_rewards(result: Any, who: str) -> float | dict[str, float] | None:
    """Return the rewards in the result of `who`. Booleans, and scalars of numpy and torch, count as numbers.

    Raises TypeError for another type, and ValueError for a reward that is not finite. Both messages begin with `who`.
    """
    if result is None:
        return None
    if isinstance(result, Mapping):
        return {
            _interaction_id(name, who): number(value, f"{who} returned a dict in which {name!r} has the reward")
            for name, value in result.items()
        }
    return number(result, f"{who} returned")


def function_rewards(result: Any, who: str) -> tuple[float | dict[str, float] | None, dict[str, float]]:
    """Return the rewards in the result of a reward function, and its further values by name.

    In a dict with `reward`, or `score` as in verl's functions, this entry is the reward of the episode. Its other
    numbers are the further values; other entries, such as the parsed answer, are ignored. Raises as `returned_rewards`.
    """
    main = next((name for name in _MAIN if name in result), None) if isinstance(result, Mapping) else None
    if main is None:
        return returned_rewards(result, who), {}
    told = f"{who} returned a dict in which {{!r}} is"
    reward = number(result[main], told.format(main), "it must be a number")
    return reward, {
        name: number(value, told.format(name))
        for name, value in result.items()
        if name != main and isinstance(name, str) and _is_number(value)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (getattr(value, "ndim", None) == 0 and isinstance(value.item(), Real))


def _interaction_id(name: Any, who: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{who} returned a dict with the key {name!r}; its keys are the ids of interactions")
    return name


def number(
    value: Any,
    told: str,
    way_out: str = "return a float (the reward of the last turn), a dict of rewards by interaction id, or None",
) -> float:
    """A finite float. `told`: the beginning of the error message, before the value. Raises TypeError or ValueError."""
    if getattr(value, "ndim", None) == 0:  # a scalar array or tensor
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{told} {_shown(value)} of type {type(value).__name__}; {way_out}")
    try:
        read = float(value)
    except OverflowError:  # an integer beyond the range of floats
        read = inf
    if not isfinite(read):
        raise ValueError(f"{told} {_shown(value)}; a reward must be a finite number")
    return read


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python limits the number of digits
        return "a number of thousands of digits"
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
