"""Returns are computed from raw rewards and never replace them.

On the tree: `return(i) = reward(i) + discount * mean(return(c) for complete children c)`, leaves first; a missing
reward counts as 0. Linear: the same along the order of completion, as AReaL's flat export does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from proxy.types import Credit, Interaction, Status


def compute_returns(interactions: Sequence[Interaction], discount: float, credit: Credit) -> dict[str, float]:
    """The return of every complete interaction by id. `interactions` are of one session, in order of `seq`."""
    complete = [interaction for interaction in interactions if interaction.status is Status.COMPLETE]
    return _linear(complete, discount) if credit is Credit.LINEAR else _tree(complete, discount)


def _tree(complete: Sequence[Interaction], discount: float) -> dict[str, float]:
    returns: dict[str, float] = {}
    children: dict[str, list[float]] = defaultdict(list)
    # A child ends after its parent was committed, so the reverse of the order of completion visits leaves first.
    for interaction in reversed(complete):
        below = children.get(interaction.id)
        future = sum(below) / len(below) if below else 0.0
        returns[interaction.id] = (interaction.reward or 0.0) + discount * future
        if interaction.parent_id is not None:
            children[interaction.parent_id].append(returns[interaction.id])
    return returns


def _linear(complete: Sequence[Interaction], discount: float) -> dict[str, float]:
    returns: dict[str, float] = {}
    future = 0.0
    for interaction in reversed(complete):
        future = (interaction.reward or 0.0) + discount * future
        returns[interaction.id] = future
    return returns
