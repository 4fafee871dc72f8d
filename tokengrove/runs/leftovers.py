"""Sessions that an earlier start of a run left on the server when it was killed.

Every session of a run has the run's id in its metadata. A session with outcome Finished was played to its end, even if
it is not in the journal: its result is read from the server. All other sessions that are not in the journal are
withdrawn.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tokengrove.client import AsyncClient, TreeNode
from tokengrove.client.options import SessionFilter
from tokengrove.errors import ConfigurationError, SessionNotFound
from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.rollout.trajectory import complete, read_tree, score_of
from tokengrove.runs.slots import RUN, Entry, Slot, place_of

logger = logging.getLogger(__name__)
_LEFT = "the run was interrupted: the episode is played again"


@dataclass(frozen=True, slots=True)
class Found:
    """A session that was played to its end but is not in the journal."""

    slot: Slot
    attempt: int
    session_id: str
    seconds: float


async def clean(client: AsyncClient, run_id: str, known: Sequence[Entry], url: str) -> list[Found]:
    """Withdraw the run's sessions that do not count, and return finished sessions that are missing from `known`.

    Raises ConfigurationError if the server has no session of the run, but the journal has: it is a different server.
    """
    listed = await sessions_of(client, run_id)
    _check_server(listed, known, url)
    kept = {entry.result.session_id for entry in known if not entry.again}
    done = {entry.slot for entry in known if not entry.again}
    found: list[Found] = []
    for session in listed:
        if session["session_id"] in kept or session.get("withdrawn"):
            continue
        if (finished := _finished(session)) is not None and finished.slot not in done:
            done.add(finished.slot)
            found.append(finished)
        else:
            await withdraw(client, session["session_id"])
    return found


async def sessions_of(client: AsyncClient, run_id: str) -> list[dict[str, Any]]:
    """All sessions of a run, in the form of the server's listing."""
    chosen: SessionFilter = {"metadata": {RUN: run_id}, "validation": "include"}
    return await client.sessions(chosen)


async def withdraw(client: AsyncClient, session_id: str) -> None:
    """Withdraw a session, if it exists."""
    try:
        await client.withdraw_session(session_id, outcome="Failed", exit_reason=_LEFT)
    except SessionNotFound:
        return
    logger.info("withdrew session %s, whose episode is played again", session_id)


def _check_server(listed: Sequence[dict[str, Any]], known: Sequence[Entry], url: str) -> None:
    if listed or not any(entry.result.failure is None and not entry.again for entry in known):
        return
    raise ConfigurationError(
        f"{url} has none of the sessions of this run: resume it with the server that it was begun with, "
        "or give another --name"
    )


def _finished(session: dict[str, Any]) -> Found | None:
    place = place_of(session["metadata"])
    if place is None or session["status"] != "ended" or session["outcome"] != "Finished":
        return None
    return Found(*place, session["session_id"], session["ended_at"] - session["created_at"])


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
