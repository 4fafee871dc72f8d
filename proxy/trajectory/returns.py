"""Returns are computed from raw rewards and never replace them.

On the tree: `return(i) = reward(i) + discount * mean(return(c) for complete children c)`, leaves first; a missing
reward counts as 0. Linear: the same along the order of completion, as AReaL's flat export does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.types import Credit, Status


class Rewarded(Protocol):
    """What returns are computed of."""

    @property
    def id(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def status(self) -> Status: ...
    @property
    def reward(self) -> float | None: ...


def compute_returns(
    interactions: Sequence[Rewarded],
    discount: float,
    credit: Credit,
    main: Mapping[str, float | None] | None = None,
) -> dict[str, float]:
    """The return of every complete interaction by id. `interactions` are of one session, in order of `seq`.

    `main` are the rewards that count, by id, where they are not the raw ones.
    """
    complete = [interaction for interaction in interactions if interaction.status is Status.COMPLETE]
    rewards = {i.id: (i.reward if main is None else main.get(i.id)) or 0.0 for i in complete}
    return _linear(rewards, discount) if credit is Credit.LINEAR else _tree(complete, rewards, discount)


def _tree(complete: Sequence[Rewarded], rewards: Mapping[str, float], discount: float) -> dict[str, float]:
    returns: dict[str, float] = {}
    children: dict[str, list[float]] = defaultdict(list)
    # A child ends after its parent was committed, so the reverse of the order of completion visits leaves first.
    for interaction in reversed(complete):
        below = children.get(interaction.id)
        future = sum(below) / len(below) if below else 0.0
        returns[interaction.id] = rewards[interaction.id] + discount * future
        if interaction.parent_id is not None:
            children[interaction.parent_id].append(returns[interaction.id])
    return returns


def _linear(rewards: dict[str, float], discount: float) -> dict[str, float]:
    """`rewards` in order of completion."""
    returns: dict[str, float] = {}
    future = 0.0
    for name in reversed(rewards):
        future = rewards[name] + discount * future
        returns[name] = future
    return returns
