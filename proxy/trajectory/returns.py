"""Discounted returns of interactions. They are computed from rewards and never replace them.

Credit `tree`: `return(i) = reward(i) + discount * mean(return(c) for complete children c of i)`, from the leaves to the
roots. Credit `linear`: `return(i) = reward(i) + discount * return(i + 1)` in order of completion, as AReaL's individual
export computes it. Turns of another route earn nothing from it. A missing reward counts as 0. An example from AReaL's
documentation: A -> B -> C with reward 1 at C and discount 0.9 has returns 0.81, 0.9 and 1.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokengrove.options.session import Credit
from tokengrove.reasons import Status


class Rewarded(Protocol):
    """The fields of an interaction that returns are computed from."""

    @property
    def id(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def status(self) -> Status: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def route(self) -> str: ...


def compute_returns(
    interactions: Sequence[Rewarded],
    discount: float,
    credit: Credit,
    main: Mapping[str, float | None] | None = None,
) -> dict[str, float]:
    """The return of every complete interaction by id. `interactions` are of one session, in order of `seq`.

    `main` are the main rewards by id; None: use the raw rewards.
    """
    complete = [interaction for interaction in interactions if interaction.status is Status.COMPLETE]
    rewards = {i.id: (i.reward if main is None else main.get(i.id)) or 0.0 for i in complete}
    return _linear(complete, rewards, discount) if credit is Credit.LINEAR else _tree(complete, rewards, discount)


def _tree(complete: Sequence[Rewarded], rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    returns: dict[str, float] = {}
    children: dict[str, list[float]] = defaultdict(list)
    # A child ends after the commit of its parent, so the reverse order of completion visits children before parents.
    for interaction in reversed(complete):
        below = children.get(interaction.id)
        future = sum(below) / len(below) if below else 0.0
        returns[interaction.id] = rewards[interaction.id] + discount * future
        if interaction.parent_id is not None:
            children[interaction.parent_id].append(returns[interaction.id])
    return returns


def _linear(complete: Sequence[Rewarded], rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    """Returns along the order of completion of each route, which is the order of `complete`."""
    returns: dict[str, float] = {}
    future: dict[str, float] = defaultdict(float)
    for interaction in reversed(complete):
        future[interaction.route] = rewards[interaction.id] + discount * future[interaction.route]
        returns[interaction.id] = future[interaction.route]
    return returns
