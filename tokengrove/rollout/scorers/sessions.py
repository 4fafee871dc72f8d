"""Scores sessions that have ended or still run, for environments that are not runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.client import AsyncClient, SessionTree
from tokengrove.client.exit_reason import exit_reason
from tokengrove.client.operations import Call, Steps, session_path
from tokengrove.client.options import SessionFilter
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.rollout.scorers.scored import Scored, ScorerFailure
from tokengrove.rollout.scorers.scorer import Scorer, as_scorer, load_scorer
from tokengrove.rollout.scorers.scoring import check_names, score_trajectory
from tokengrove.rollout.trajectory import Trajectory, read_trajectory, read_tree

TaskOf = Callable[[SessionTree], Mapping[str, Any]]


async def score_sessions(
    client: AsyncClient,
    filter: SessionFilter | None,
    scorers: Sequence[Scorer | Callable[..., Any] | str],
    *,
    tasks: Mapping[str, Mapping[str, Any]] | TaskOf | None = None,
    concurrency: int = 16,
    timeout_s: float | None = 600.0,
    again: bool = False,
) -> list[Scored]:
    """Score the sessions that `filter` selects (None: all ended sessions), and record the scores as named rewards.

    `client`: has the admin key. `scorers`: scorers, functions or their paths. `tasks`: the rows by task id, or a
    function from a session to its row; without a row, a session's metadata are used. `concurrency`: the number of
    sessions that are scored at once. `timeout_s`: seconds that a call of a scorer may take. A scorer whose rewards a
    session already has is not called, unless `again` is true, so an interrupted call can be repeated.

    The result has an entry for each session, in the order of the server's list. If the server refuses to read a session
    or to record its scores, the entry has a failure. Raises InvalidRequest for invalid scorers, and the server's errors
    for the list itself.
    """
    made = [load_scorer(each) if isinstance(each, str) else as_scorer(each, _name(each)) for each in scorers]
    check_names(made)
    if concurrency < 1:
        raise InvalidRequest("'concurrency' must be at least 1", param="concurrency")
    listed = await client.sessions({"status": "ended"} if filter is None else filter)
    room = asyncio.Semaphore(concurrency)

    async def one(session_id: str) -> Scored:
        async with room:
            return await _scored(client, session_id, made, tasks, timeout_s, again)

    running = [asyncio.ensure_future(one(each["session_id"])) for each in listed]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _scored(
    client: AsyncClient,
    session_id: str,
    scorers: Sequence[Scorer],
    tasks: Mapping[str, Mapping[str, Any]] | TaskOf | None,
    timeout_s: float | None,
    again: bool,
) -> Scored:
    try:
        tree = await read_tree(client, session_id)
        trajectory = await read_trajectory(client, tree, _task(tree, tasks))
        wanted = [scorer for scorer in scorers if again or not _has(trajectory, scorer)]
        return await score_trajectory(wanted, trajectory, recorder(client, session_id), timeout_s, client)
    except ProxyError as error:
        return Scored(session_id, {}, [ScorerFailure("all", None, f"session {session_id}: {exit_reason(error)}")])


def recorder(client: AsyncClient, session_id: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function that records rewards of a session with the client's key."""

    async def record(body: Mapping[str, Any]) -> None:
        await client.run(_set_reward(session_id, body))

    return record


def _set_reward(session_id: str, body: Mapping[str, Any]) -> Steps[None]:
    yield Call("POST", f"/{session_path(session_id)}/rl/set_reward", body)


def _has(trajectory: Trajectory, scorer: Scorer) -> bool:
    """Whether the scorer has scored this trajectory: all turns, or any turn for a scorer of trajectories."""
    scored = [scorer.name in turn.rewards for turn in trajectory.turns]
    return bool(scored) and (all(scored) if scorer.per == "turn" else any(scored))


def _task(tree: SessionTree, tasks: Mapping[str, Mapping[str, Any]] | TaskOf | None) -> Mapping[str, Any]:
    if callable(tasks):
        return tasks(tree)
    metadata: Mapping[str, Any] = tree.extra.get("metadata") or {}
    found = (tasks or {}).get(str(metadata.get("task_id", tree.task_id)))
    return metadata if found is None else found


def _name(found: Any) -> str:
    return getattr(found, "__name__", None) or type(found).__name__
