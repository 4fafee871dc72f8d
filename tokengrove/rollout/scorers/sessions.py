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
from tokengrove.rollout.scorers.scoring import Wanted, check_names, every, score_trajectory, unscored
from tokengrove.rollout.trajectory import read_whole, trajectory_of

TaskOf = Callable[[SessionTree], Mapping[str, Any]]
Tasks = Mapping[str, Mapping[str, Any]] | TaskOf | None
"""The rows by task id, or a function from a session to its row."""


async def score_sessions(
    client: AsyncClient,
    filter: SessionFilter | None,
    scorers: Sequence[Scorer | Callable[..., Any] | str],
    *,
    tasks: Tasks = None,
    concurrency: int = 16,
    timeout_s: float | None = 600.0,
    again: bool = False,
) -> list[Scored]:
    """Score the sessions that `filter` selects (None: all ended sessions), and record the scores as named rewards.

    `client`: has the admin key. `scorers`: scorers, functions or their paths. `tasks`: the rows by task id, or a
    function from a session to its row; without a row, a session's metadata are used. `concurrency`: the number of
    sessions that are scored at once. `timeout_s`: seconds that a call of a scorer may take. A scorer is not called
    for what has its reward already, unless `again` is true, so an interrupted call can be repeated.

    The result has an entry for each session, in the order of the server's list. If the server refuses to read a session
    or to record its scores, the entry has a failure. Raises InvalidRequest for invalid scorers, and the server's errors
    for the list itself.
    """
    made = loaded(scorers)
    if concurrency < 1:
        raise InvalidRequest("'concurrency' must be at least 1", param="concurrency")
    listed = await client.sessions({"status": "ended"} if filter is None else filter)
    room = asyncio.Semaphore(concurrency)

    async def one(session_id: str) -> Scored:
        async with room:
            return await score_session(client, session_id, made, tasks, timeout_s, every if again else unscored)

    running = [asyncio.ensure_future(one(each["session_id"])) for each in listed]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def score_session(
    client: AsyncClient,
    session_id: str,
    scorers: Sequence[Scorer],
    tasks: Tasks = None,
    timeout_s: float | None = None,
    wanted: Wanted = every,
) -> Scored:
    """Score one session. The server's errors are failures of the result."""
    try:
        tree = await read_whole(client, session_id)
        trajectory = trajectory_of(tree, _task(tree, tasks))
        return await score_trajectory(scorers, trajectory, recorder(client, session_id), timeout_s, client, wanted)
    except ProxyError as error:
        return Scored(session_id, {}, [ScorerFailure("all", None, f"session {session_id}: {exit_reason(error)}")])


def loaded(scorers: Sequence[Scorer | Callable[..., Any] | str]) -> list[Scorer]:
    """The scorers of functions and paths. Raises InvalidRequest for what is no scorer, and for two of one name."""
    made = [load_scorer(each) if isinstance(each, str) else as_scorer(each, _name(each)) for each in scorers]
    check_names(made)
    return made


def recorder(client: AsyncClient, session_id: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function that records rewards of a session with the client's key."""

    async def record(body: Mapping[str, Any]) -> None:
        await client.run(_set_reward(session_id, body))

    return record


def _set_reward(session_id: str, body: Mapping[str, Any]) -> Steps[None]:
    yield Call("POST", f"/{session_path(session_id)}/rl/set_reward", body)


def _task(tree: SessionTree, tasks: Tasks) -> Mapping[str, Any]:
    if callable(tasks):
        return tasks(tree)
    metadata: Mapping[str, Any] = tree.extra.get("metadata") or {}
    found = (tasks or {}).get(str(metadata.get("task_id", tree.task_id)))
    return metadata if found is None else found


def _name(found: Any) -> str:
    return getattr(found, "__name__", None) or type(found).__name__
