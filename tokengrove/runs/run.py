"""The run itself: plays episodes concurrently, each with its retries, until all have ended or the run is stopped.

The result of an episode is in the journal before it is counted. A stopped run cancels running episodes. Sessions of
episodes that will be retried are withdrawn, so no group counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult, Task
from tokengrove.rollout.executors import Executor
from tokengrove.rollout.failure_log import FailureLog, TooManyFailedEpisodes
from tokengrove.rollout.run_options import RunOptions
from tokengrove.rollout.scheduler import INFRASTRUCTURE, Scheduler, play_with_retries
from tokengrove.runs.journal import Journal
from tokengrove.runs.observer import Observer
from tokengrove.runs.slots import Entry, Planner, Slot
from tokengrove.runs.summary import Summary

_IN_A_ROW = 4
"""Failures in a row that stop the run, as a multiple of the concurrency; at least 32."""


class Run:
    """Plays episodes, and keeps the result of each in `entries`: that of its last attempt."""

    def __init__(
        self,
        options: RunOptions,
        planner: Planner,
        executor: Executor,
        summary: Summary,
        observer: Observer,
        journal: Journal | None,
    ) -> None:
        self._options, self._planner, self._executor = options, planner, executor
        self._summary, self._observer, self._journal = summary, observer, journal
        self._scheduler = Scheduler(self._episode, options.concurrency)
        self._in_a_row = 0
        self._failures = FailureLog(options.most_failed, options.group_size)
        self.entries: dict[Slot, EpisodeResult] = {}
        self.server_failed = False

    def take_over(self, entries: Iterable[Entry]) -> None:
        """Count the entries of an earlier start."""
        for slot, result, again in entries:
            if again:
                self._summary.retries[str(result.failure)] += 1
            else:
                self.entries[slot] = result
                self._summary.add(slot.group, result, earlier=True)

    async def play(self, slots: Iterable[tuple[Slot, Task]], attempts: Mapping[Slot, int]) -> None:
        """Play the remaining episodes. `attempts`: the number of earlier attempts per slot.

        Raises ConfigurationError if the journal cannot be written.
        """
        waiting = ((slot, task, attempts.get(slot, 0)) for slot, task in slots if slot not in self.entries)
        try:
            await self._scheduler.run(waiting)
        except OSError as error:
            raise ConfigurationError(f"the journal of the run cannot be written: {error.strerror}") from error

    def stop(self, why: str) -> None:
        """Start no more episodes, and cancel running ones. Ended episodes are kept. Only the first reason counts."""
        if self._summary.stopped is not None:
            return
        self._summary.stopped = why
        self._observer.stopping(why)
        self._scheduler.stop()

    async def record(self, entry: Entry) -> None:
        """Record an ended attempt in the journal, and count it."""
        if self._journal is not None:
            await self._journal.append(entry)
        slot, result, again = entry
        self._watch(result)
        if again:
            self._summary.retries[str(result.failure)] += 1
            self._observer.retried(result)
            return
        self.entries[slot] = result
        self._summary.add(slot.group, result)
        self._observer.finished(result)
        if self._options.fail_fast and self._summary.failed > self._options.max_failures:
            self.stop(f"{self._summary.failed} episodes failed, and {self._options.max_failures} may (--fail-fast)")
        try:
            self._failures.note(result.failed)
        except TooManyFailedEpisodes as error:
            self.stop(str(error))

    async def _episode(self, waiting: tuple[Slot, Task, int]) -> None:
        slot, task, first = waiting

        def plan_of(number: int, is_last: bool) -> EpisodePlan:
            plan = self._planner.plan(slot, task, first + number, last=is_last)
            self._observer.started(plan)
            return plan

        async def record(result: EpisodeResult, again: bool) -> None:
            await self.record(Entry(slot, result, again))

        await play_with_retries(self._executor, plan_of, self._options.retries, self._options.retry_on, record)

    def _watch(self, result: EpisodeResult) -> None:
        """Stop the run after too many failures of the server or of workers in a row."""
        if result.failure not in INFRASTRUCTURE:
            self._in_a_row = 0
            return
        self.server_failed = True
        self._in_a_row += 1
        if self._in_a_row >= max(32, _IN_A_ROW * self._options.concurrency):
            self.stop(f"{self._in_a_row} attempts in a row failed, the last one ({result.failure}): {result.message}")
