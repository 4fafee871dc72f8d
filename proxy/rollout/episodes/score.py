"""The score of a session, by the rule of exports."""

from __future__ import annotations

from math import fsum

from proxy.client import AsyncClient, SessionTree
from proxy.rollout.trajectory import complete

_ASKED_AGAIN = frozenset({"resampled", "template", "drift"})
"""The reasons of turns that may be another answer to the prompt of an earlier one: then paths are compared."""


async def score_of(client: AsyncClient, tree: SessionTree) -> float | None:
    """The sum of the rewards of a session, None without any.

    Where answers to one prompt may have been rewarded each by itself, it is asked of an export, which tells.
    """
    nodes = complete(tree)
    rewards = [float(node.reward) for node in nodes if node.reward is not None]
    if len(rewards) > 1 and any(node.reason in _ASKED_AGAIN for node in nodes):
        export = await client.export(session_id=tree.session_id)
        score: float | None = export.sessions[tree.session_id]["score"]
        return score
    return fsum(rewards) if rewards else None
