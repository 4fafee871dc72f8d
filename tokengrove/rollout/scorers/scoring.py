"""Calls all scorers of one trajectory concurrently, and records each score as a named reward, even if others fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tokengrove.client import AsyncClient
from tokengrove.client.exit_reason import exit_reason, storable
from tokengrove.errors import InvalidRequest, NotFound
from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.scorers.scored import Scored, ScorerFailure
from tokengrove.rollout.scorers.scorer import Scorer
from tokengrove.rollout.trajectory import Trajectory, Turn

Record = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends the body of a `set_reward`."""

Wanted = Callable[[Scorer, Turn], bool]


def every(scorer: Scorer, turn: Turn) -> bool:
    """Score all turns, also those that have the scorer's reward."""
    return True


def unscored(scorer: Scorer, turn: Turn) -> bool:
    """Whether the turn does not have the scorer's reward."""
    return scorer.name not in turn.rewards


async def score_trajectory(
    scorers: Sequence[Scorer],
    trajectory: Trajectory,
    record: Record,
    timeout_s: float | None = None,
    client: AsyncClient | None = None,
    wanted: Wanted = every,
) -> Scored:
    """Call all scorers and record their results.

    `timeout_s`: seconds that a call may take, unless the scorer has its own limit. `client`: passed to scorers with
    this parameter. `wanted`: whether a scorer is called for a turn; a scorer of trajectories is called if all turns are
    wanted. The score of a trajectory is recorded on its last turn. Raises InvalidRequest for two scorers with the same
    name, and the exceptions of `record`, except InvalidRequest and NotFound, which are failures of the scorer.
    """
    check_names(scorers)
    calls = [_Call(scorer, turn) for scorer in scorers for turn in _parts(scorer, trajectory, wanted)]
    running = [asyncio.ensure_future(call.run(trajectory, record, timeout_s, client)) for call in calls]
    try:
        await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    found = {
        scorer.name: [value for call in calls if call.scorer is scorer for value in call.values] for scorer in scorers
    }
    scores = {name: fmean(values) for name, values in found.items() if values}
    return Scored(
        trajectory.session_id,
        scores,
        [call.failure for call in calls if call.failure is not None],
        [(call.scorer.name, call.interaction_id) for call in calls if not call.values and call.failure is None],
    )


def check_names(scorers: Sequence[Scorer]) -> None:
    """Raise InvalidRequest for two scorers with the same name."""
    names = [scorer.name for scorer in scorers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"two scorers have the name {twice!r}: rename one of them", param="scorers")


def _parts(scorer: Scorer, trajectory: Trajectory, wanted: Wanted) -> Sequence[Turn | None]:
    """The turns for which a scorer is called; [None]: once for the trajectory. Empty if there are no turns."""
    left = [turn for turn in trajectory.turns if wanted(scorer, turn)]
    if scorer.per == "turn":
        return [turn for turn in left if turn.next_messages or not scorer.reads_next]
    return [None] if left and len(left) == len(trajectory.turns) else []


class _Call:
    """One call of a scorer: its values, or its failure."""

    def __init__(self, scorer: Scorer, turn: Turn | None) -> None:
        self.scorer, self._turn = scorer, turn
        self.values: list[float] = []
        self.failure: ScorerFailure | None = None

    @property
    def interaction_id(self) -> str | None:
        """The turn; None for the trajectory."""
        return None if self._turn is None else self._turn.interaction_id

    async def run(
        self, trajectory: Trajectory, record: Record, timeout_s: float | None, client: AsyncClient | None
    ) -> None:
        try:
            by_turn = await self._scores(trajectory, timeout_s, client)
        except Exception as error:
            self._fail(error)
            return
        for interaction_id, value in by_turn.items():
            try:
                await record({"interaction_id": interaction_id, "name": self.scorer.name, "reward": value})
            except (InvalidRequest, NotFound) as error:
                self._fail(error)
            else:
                self.values.append(value)

    async def _scores(
        self, trajectory: Trajectory, timeout_s: float | None, client: AsyncClient | None
    ) -> dict[str, float]:
        """The scores by interaction id."""
        if self._turn is not None:
            score = await self.scorer.score_turn(self._turn, trajectory, timeout_s, client)
            return {} if score is None else {self._turn.interaction_id: score}
        result = await self.scorer.score_trajectory(trajectory, timeout_s, client)
        if isinstance(result, dict):
            return result
        last = trajectory.last
        return {} if result is None or last is None else {last.interaction_id: result}

    def _fail(self, error: Exception) -> None:
        told = storable(str(error)) if isinstance(error, AgentFailed) else exit_reason(error)
        of = None if self._turn is None else self._turn.interaction_id
        self.failure = ScorerFailure(self.scorer.name, of, told)
