"""A whole run: reads the tasks, takes over earlier results, plays the remaining episodes, writes summary and export."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokengrove.client import AsyncClient
from tokengrove.errors import ConfigurationError, ProxyError
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import EpisodeResult, Server, Task
from tokengrove.rollout.executors import Executor, ExecutorOptions, RayOptions, executor_for
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.agents import agent_of, check_agent, check_paths
from tokengrove.runs.leftovers import clean, recovered
from tokengrove.runs.observer import Observer
from tokengrove.runs.run import Run
from tokengrove.runs.run_folder import Identity, RunFolder
from tokengrove.runs.samples import Samples
from tokengrove.runs.session_trial import try_session
from tokengrove.runs.slots import Entry, Planner, Slot, slots_of
from tokengrove.runs.summary import Summary
from tokengrove.runs.tasks import as_tasks, tasks_of

Stop = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a run. `results`: the last attempt at each ended episode, in order of tasks and samples."""

    run_id: str
    summary: Summary
    results: tuple[EpisodeResult, ...]
    folder: Path | None

    @property
    def session_ids(self) -> list[str]:
        """The sessions of the episodes that were played to their end, for the export of a trainer."""
        return [result.session_id for result in self.results if result.failure is None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run with checked options and tasks and an open folder, but without a server yet."""

    options: RunOptions
    tasks: Sequence[Task]
    folder: RunFolder | None

    def close(self) -> None:
        """Let other processes resume the run."""
        if self.folder is not None:
            self.folder.close()


def prepare(options: RunOptions, tasks: Iterable[object] | None = None) -> Prepared:
    """Check the options, read the tasks and open the run's folder. Raises ConfigurationError.

    With `executor` ray, the agent is not checked: Ray's workers may have packages that are missing here.
    """
    options = options.checked()
    chosen = _tasks(options, tasks)
    if options.executor != "ray":
        check_paths(options, chosen[0])
    return Prepared(options, chosen, None if options.folder is None else RunFolder.open(options, chosen))


async def run_episodes(
    options: RunOptions,
    tasks: Iterable[object] | None = None,
    *,
    observer: Observer | None = None,
    executor: Executor | None = None,
    on_start: Callable[[Stop], None] | None = None,
) -> Played:
    """Play `options.group_size` episodes of each task, and return their results.

    `tasks`: tasks of a trainer, in place of `options.data`; each is a `Task`, or a mapping like a row of a file. With a
    `folder`, an earlier start of the run is resumed. `executor`: an existing executor; it is not closed. `on_start` is
    called with a function that stops the run; call it on this event loop, with the reason. If this call is cancelled,
    the run is also stopped, and can be resumed.

    Raises ConfigurationError for options, data or a folder that do not fit, and the server's errors outside of
    episodes. A failed episode raises nothing: its result has the failure.
    """
    if options.url is None:
        raise ConfigurationError("--url is missing: the address of the server that the episodes are played with")
    prepared = prepare(options, tasks)
    try:
        return await play_prepared(
            prepared, Server(options.url, options.admin_key), observer=observer, executor=executor, on_start=on_start
        )
    finally:
        prepared.close()


async def play_prepared(
    prepared: Prepared,
    server: Server,
    *,
    observer: Observer | None = None,
    executor: Executor | None = None,
    on_start: Callable[[Stop], None] | None = None,
) -> Played:
    """`run_episodes`, with a server that was started once the run's folder was known."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(server.url, server.admin_key))
        if prepared.options.executor != "ray":
            await check_agent(prepared.options, prepared.tasks[0])
        if executor is None:
            executor = executor_for(_executor_options(prepared.options), server_url=server.url)
            stack.push_async_callback(executor.close)
        return await _Whole(prepared, server, client, executor, observer or Observer()).play(on_start)


class _Whole:
    """One start of a run."""

    def __init__(
        self, prepared: Prepared, server: Server, client: AsyncClient, executor: Executor, observer: Observer
    ) -> None:
        options, tasks, folder = prepared.options, prepared.tasks, prepared.folder
        self._options, self._tasks, self._folder = options, tasks, folder
        self._server, self._client, self._observer = server, client, observer
        self._identity = Identity.drawn(options, tasks) if folder is None else folder.identity
        self._summary = Summary(
            name=None if folder is None else folder.path.name,
            episodes=len(tasks) * options.group_size * options.passes,
            group_size=options.group_size,
            success=options.success,
            allowed=options.max_failures,
        )
        mine = None if folder is None else folder.output
        self._summary.output = mine
        self._samples = self._samples_of(folder, mine) if options.exports else None
        planner = Planner(
            self._identity.run_id, options, self._server, agent_of(options, tasks[0]), self._identity.seed
        )
        journal = None if folder is None else folder.journal
        self._run = Run(options, planner, executor, self._summary, observer, journal)

    def _samples_of(self, folder: RunFolder | None, mine: str | None) -> Samples:
        return Samples(self._options, self._summary.episodes, None if folder is None else folder.path, mine)

    async def play(self, on_start: Callable[[Stop], None] | None) -> Played:
        await self._reach()
        entries = await self._take_over()
        self._observer.planned(self._summary.episodes, self._summary.ended, self._summary)
        if on_start is not None:
            on_start(self._stop)
        try:
            await self._run.play(slots_of(self._tasks, self._options), _attempts(entries))
        except asyncio.CancelledError:
            self._run.stop("cancelled")
            await to_the_end(self._close())
            raise
        except BaseException:
            self._summary.stopped = self._summary.stopped or "an error"
            with suppress(OSError):  # the error that ended the run, such as a full disk, matters more
                self._write_summary()
            raise
        return await self._close()

    def _stop(self, why: str) -> None:
        """Stop the run, unless all episodes have been played: then only the samples remain."""
        if not self._summary.complete:
            self._run.stop(why)

    async def _close(self) -> Played:
        """Finish the run after the last episode: clean up, export, and write the summary."""
        if self._run.server_failed and self._summary.stopped is None:
            await clean(self._client, self._identity.run_id, self._entries(), self._server.url)
        self._summary.end()
        try:
            if self._samples is not None and self._is_to_be_exported():
                await self._export(self._samples)
        finally:
            self._write_summary()
        self._observer.ended(self._summary)
        path = None if self._folder is None else self._folder.path
        return Played(self._identity.run_id, self._summary, self._results(), path)

    def _is_to_be_exported(self) -> bool:
        summary = self._summary
        return summary.complete and summary.stopped is None and summary.exportable(self._options.export_failed)

    async def _reach(self) -> None:
        try:
            await self._client.ready()
        except ProxyError as error:
            raise ConfigurationError(f"--url {self._server.url}: {error.message}") from None
        await try_session(self._client, self._options, self._identity.run_id)
        if self._samples is not None:
            await self._samples.check(self._client, self._identity.run_id)

    async def _take_over(self) -> list[Entry]:
        """The entries of earlier starts. Other sessions that they left on the server are withdrawn."""
        if self._folder is None or not self._folder.resumed:
            return []
        entries = self._folder.journal.entries
        kept = list(entries)
        if self._options.retry_failed:
            done = {entry.slot for entry in entries if not entry.again and entry.result.failure is None}
            kept = [entry for entry in entries if entry.again or entry.slot in done]
        for found in await clean(self._client, self._identity.run_id, _last(kept), self._server.url):
            entry = await recovered(self._client, found)
            await self._folder.journal.append(entry)
            kept.append(entry)
        self._run.take_over(_last(kept))
        return entries

    async def _export(self, samples: Samples) -> None:
        self._observer.exporting(str(samples.target))
        tally = await asyncio.to_thread(samples.write, self._server, self._identity.run_id, self._results())
        self._summary.output = str(samples.target)
        self._summary.export = {
            "sessions": tally.sessions,
            "samples": tally.samples,
            "trained_tokens": tally.trained,
            "untrained_tokens": dict(tally.untrained),
            "warnings": tally.warnings,
        }

    def _write_summary(self) -> None:
        self._summary.end()
        if self._folder is not None:
            self._folder.write_summary(self._summary.as_json())

    def _results(self) -> tuple[EpisodeResult, ...]:
        slots = slots_of(self._tasks, self._options)
        return tuple(self._run.entries[slot] for slot, _ in slots if slot in self._run.entries)

    def _entries(self) -> list[Entry]:
        return [Entry(slot, result) for slot, result in self._run.entries.items()]


def _tasks(options: RunOptions, tasks: Iterable[object] | None) -> list[Task]:
    if tasks is not None:
        found = as_tasks(tasks, id_field=options.task_id_field, limit=options.limit)
        if not found:
            raise ConfigurationError("there are no tasks to play")
        return found
    if options.data is None:
        raise ConfigurationError("--data is missing: a file of tasks, or package.module:tasks")
    return tasks_of(options.data, options.task_id_field, options.limit)


def _executor_options(options: RunOptions) -> ExecutorOptions:
    kind: Any = options.executor
    given: dict[str, Any] = {
        "address": options.ray_address,
        "num_cpus": options.ray_cpus,
        "episodes_per_worker": options.ray_episodes,
        "runtime_env": dict(options.ray_runtime_env) or None,
    }
    ray = RayOptions(**{name: value for name, value in given.items() if value is not None}) if kind == "ray" else None
    return ExecutorOptions(kind=kind, concurrency=options.concurrency, workers=options.workers, ray=ray)


def _attempts(entries: Sequence[Entry]) -> Counter[Slot]:
    """The number of attempts at each episode."""
    return Counter(entry.slot for entry in entries)


def _last(entries: Iterable[Entry]) -> list[Entry]:
    """All attempts that were retried, and the last final attempt at each episode: `--retry-failed` adds lines."""
    last = {entry.slot: entry for entry in entries if not entry.again}
    return [*(entry for entry in entries if entry.again), *last.values()]
