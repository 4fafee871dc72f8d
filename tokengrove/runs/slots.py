"""The slots of a run (a sample of a task in a pass over the data), and the plan of an attempt at a slot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from tokengrove.client.options import SessionOptions
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, FailureKind, Server, Task
from tokengrove.rollout.run_options import RunOptions
from tokengrove.rollout.session_start import merged_options, unused_session_id

RUN, PLACE = "tokengrove_run", "tokengrove_episode"
"""Metadata keys of all sessions of a run: the run's id, and the pass, task id, sample and attempt."""

_NOT_OF_AN_ID = re.compile(r"[^\w.-]+", re.ASCII)
_NAME_LENGTH = 60
_SEED_BITS = 31


class Slot(NamedTuple):
    """One episode of a run, however many attempts it takes. `epoch`: the pass over the data, from 0."""

    epoch: int
    task_id: str
    sample: int

    @property
    def group(self) -> tuple[int, str]:
        return self.epoch, self.task_id


class Entry(NamedTuple):
    """An ended attempt. `again`: the episode is retried."""

    slot: Slot
    result: EpisodeResult
    again: bool = False


def slots_of(tasks: Sequence[Task], options: RunOptions) -> Iterator[tuple[Slot, Task]]:
    """All episodes, group by group, so that the first groups are complete early."""
    for epoch in range(options.passes):
        for task in tasks:
            for sample in range(options.group_size):
                yield Slot(epoch, task.task_id, sample), task


@dataclass(frozen=True, slots=True)
class Planner:
    """Creates the plans of one run. `run_id`: the unique id of the run; `seed`: the run's seed."""

    run_id: str
    options: RunOptions
    server: Server
    agent: AgentSpec
    seed: int

    def plan(self, slot: Slot, task: Task, attempt: int, *, last: bool) -> EpisodePlan:
        """The plan of an attempt, with a new session. If the `last` attempt fails, the episode has failed."""
        options, seed = self.options, self._seed(slot)
        return EpisodePlan(
            task=task,
            sample=slot.sample,
            attempt=attempt,
            server=self.server,
            agent=self.agent,
            session_id=unused_session_id(f"{slot.task_id}-{slot.sample}"),
            seed=seed,
            timeout_s=options.timeout_s,
            start_timeout_s=options.start_timeout_s,
            scoring_timeout_s=options.scoring_timeout_s,
            reward=options.reward,
            scorers=options.scorer,
            options=self._session(slot, task, attempt, seed),
            validation=options.validation,
            discard=_kinds(("cancelled",) if last else ("cancelled", *options.retry_on)),
        )

    def _seed(self, slot: Slot) -> int:
        """The seed of an episode, the same for all attempts."""
        text = f"{self.seed}\0{slot.epoch}\0{slot.task_id}\0{slot.sample}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> (64 - _SEED_BITS)

    def _session(self, slot: Slot, task: Task, attempt: int, seed: int) -> SessionOptions:
        place = [slot.epoch, slot.task_id, slot.sample, attempt]
        fields = merged_options(self.options.session_fields(), task.options)
        if self.options.seed is not None:
            fields["sampling"] = {"seed": seed, **fields.get("sampling", {})}
        fields["metadata"] = {**fields.get("metadata", {}), RUN: self.run_id, PLACE: place}
        fields["group_id"], fields["group_size"] = self.group_id(slot), self.options.group_size
        return fields

    def group_id(self, slot: Slot) -> str:
        """The group id, unique among all runs: several runs may play the same task."""
        digest = blake2b(slot.task_id.encode(), digest_size=4).hexdigest()
        return f"{_NOT_OF_AN_ID.sub('-', slot.task_id)[:_NAME_LENGTH]}-{self.run_id}-{slot.epoch}-{digest}"


def place_of(metadata: Mapping[str, Any]) -> tuple[Slot, int] | None:
    """The episode and attempt of a session, from its metadata; None for a session outside runs."""
    match metadata.get(PLACE):
        case [int(epoch), str(task_id), int(sample), int(attempt)]:
            return Slot(epoch, task_id, sample), attempt
    return None


def _kinds(names: Sequence[str]) -> frozenset[FailureKind]:
    return frozenset(names)  # type: ignore[arg-type]
