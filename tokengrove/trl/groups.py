"""Plans groups: each row of the dataset, epoch by epoch, is one group of sessions.

The worker delivers the sessions to the trainer, so no claim gets them (`delivery: runner`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, FailureKind, Server
from tokengrove.rollout.session_start import merged_options, unused_session_id
from tokengrove.trl.specs import task_of

RETRIED: frozenset[FailureKind] = frozenset({"agent", "no_data", "reward", "scorer", "server", "timeout", "worker"})
"""Failures after which an episode is retried. The sessions of failed attempts are withdrawn."""
Planner = Callable[[int, int, bool], EpisodePlan]


class Groups:
    """The groups of one training run, numbered from 0. Their sessions have ids that no other run has."""

    def __init__(
        self,
        dataset: Iterable[Any],
        size: int,
        *,
        server: Server,
        agent: AgentSpec,
        reward: str | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
        options: SessionOptions,
        seed: int = 0,
    ) -> None:
        if size < 1:
            raise InvalidRequest(f"group_size is {size}; it must be at least 1", param="group_size")
        self._dataset, self.size, self._seed = dataset, size, seed
        self._server, self._agent, self._reward = server, agent, reward
        self._timeout_s, self._start_timeout_s, self._options = timeout_s, start_timeout_s, options
        self._run = f"trl-{secrets.token_hex(4)}"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield numbers and rows without end. Raises InvalidRequest for a dataset without rows, or that is used up."""
        number = 0
        while True:
            before = number
            for row in self._dataset:
                yield number, row
                number += 1
            if number == before:
                some = "has no more rows; pass one that can be iterated again" if number else "has no rows"
                raise InvalidRequest(f"the dataset {some}", param="dataset")

    def planner(self, number: int, row: Any) -> Planner:
        """Return a function that plans the episodes of one group. Its arguments are the sample, the number of the
        attempt, and whether this is the last attempt.
        """
        group, task = f"{self._run}-{number}", task_of(row, f"row-{number}")
        options: SessionOptions = {
            "delivery": "runner",
            **merged_options(self._options, task.options),
            "group_id": group,
            "group_size": self.size,
        }

        def plan(sample: int, attempt: int, is_last: bool) -> EpisodePlan:
            return EpisodePlan(
                task=task,
                sample=sample,
                attempt=attempt,
                server=self._server,
                agent=self._agent,
                session_id=unused_session_id(f"{group}-{sample}"),
                seed=self._seed + number * self.size + sample,
                timeout_s=self._timeout_s,
                start_timeout_s=self._start_timeout_s,
                reward=self._reward,
                options=options,
                discard=frozenset() if is_last else RETRIED,
            )

        return plan
