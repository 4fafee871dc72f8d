"""Reads an episode's result from the server: the run was killed after the session ended, before the journal had it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from tokengrove.client import AsyncClient, TreeNode
from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.rollout.trajectory import complete, read_tree, score_of
from tokengrove.runs.leftovers import Found
from tokengrove.runs.slots import Entry


async def recovered(client: AsyncClient, found: Found) -> Entry:
    """The entry that the journal lacks. Its `scores` are the means of the turns' named rewards."""
    tree = await read_tree(client, found.session_id)
    nodes = complete(tree)
    result = EpisodeResult(
        task_id=found.slot.task_id,
        sample=found.slot.sample,
        attempt=found.attempt,
        session_id=found.session_id,
        reward=score_of(tree),
        scores=await _scores(client, found.session_id, nodes),
        turns=len(nodes),
        prompt_tokens=sum(node.prompt_tokens for node in nodes),
        output_tokens=sum(node.output_tokens for node in nodes),
        seconds=found.seconds,
    )
    return Entry(found.slot, result)


async def _scores(client: AsyncClient, session_id: str, nodes: Sequence[TreeNode]) -> dict[str, float]:
    named: dict[str, list[float]] = defaultdict(list)
    for node in nodes:
        for name, value in (await client.show_turn(session_id, node.id))["rewards"].items():
            named[name].append(float(value))
    return {name: fmean(values) for name, values in named.items()}
