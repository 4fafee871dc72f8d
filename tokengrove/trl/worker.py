"""TRL's RolloutWorkerProtocol: an agent plays groups of episodes, and their samples go to the trainer.

Each row of the dataset is played by `group_size` sessions at once, which are compared with each other. A failed episode
is not compared and gives no sample, unless it was rewarded despite its timeout. A lost server or an agent that always
fails ends the worker, and `check_health` raises the reason, so that a trainer does not wait for samples that will not
come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from tokengrove.client import AsyncClient
from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes import EpisodeResult, Server
from tokengrove.rollout.executors import Executor, ExecutorOptions, executor_for
from tokengrove.rollout.failure_log import FailureLog
from tokengrove.rollout.scheduler import Scheduler, play_with_retries
from tokengrove.trl.buffer import Buffer
from tokengrove.trl.delivery import Delivery
from tokengrove.trl.groups import RETRIED, Groups, Planner
from tokengrove.trl.loop_thread import LoopThread, Running
from tokengrove.trl.metrics import Metrics
from tokengrove.trl.outcomes import Outcomes
from tokengrove.trl.specs import Named, NamedAgent, path_of, sampled, spec_of


class AgentWorker:
    """A rollout worker for `AsyncGRPOTrainer(rollout_worker=...)`.

    `agent` and `reward`: functions or classes of modules, or their paths; a list of words as `agent` is a command.
    `arguments`: arguments of the agent. `sampling` applies to every turn and overrides the agent's parameters. TRL
    computes with one temperature, that of its configuration: set it here if agents set their own. `dataset` is played
    repeatedly, in its order.

    `at_once`: episodes that run at the same time in this process; `executor` replaces it. `buffer_size`: rows that wait
    for the trainer. When the buffer is full, finished groups wait; at most `at_once / group_size` groups (rounded up)
    and one more are played or wait. `max_staleness`: rows that are more than this many weight versions old are dropped
    here; None: TRL drops its own. `retries`: how often a failed episode is retried. `options`: options of
    `Client.start_session`. `timeout_s`: seconds that an agent may run; None: no limit. `start_timeout_s`: seconds to
    wait for a full or unavailable server. After `max_failed_episodes` failed episodes in a row, the worker ends
    (default: three groups; -1: no limit).
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        agent: NamedAgent,
        dataset: Iterable[Any],
        group_size: int,
        reward: Named | None = None,
        arguments: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        at_once: int = 16,
        buffer_size: int = 1024,
        max_staleness: int | None = None,
        retries: int = 0,
        timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
        options: SessionOptions | None = None,
        executor: ExecutorOptions | None = None,
        seed: int = 0,
        max_failed_episodes: int | None = None,
    ) -> None:
        if retries < 0:
            raise InvalidRequest(f"'retries' must be at least 0, not {retries}", param="retries")
        self.url = url
        self.model_version = 0
        self.rollout_buffer = Buffer(buffer_size)
        self._metrics = Metrics()
        self.metrics_queue = self._metrics.queue
        self._server = Server(url, admin_key)
        self._executor = executor or ExecutorOptions(concurrency=at_once)
        self._groups = Groups(
            dataset,
            group_size,
            server=self._server,
            agent=spec_of(agent, arguments),
            reward=None if reward is None else path_of(reward),
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            options=sampled(options or {}, sampling),
            seed=seed,
        )
        self._ahead = -(-self._executor.concurrency // group_size) + 1
        self.failures = FailureLog(max_failed_episodes, group_size)
        self._max_staleness, self._retries = max_staleness, retries
        self._loop = LoopThread("tokengrove-trl-worker")
        self._running: Running[None] | None = None

    def start(self) -> None:
        """Start to play. A second call has no effect."""
        if self._running is None:
            self._running = self._loop.submit(self._play())

    def stop(self) -> None:
        """Cancel the running episodes, and wait until they have ended. May be called again."""
        if self._running is not None:
            self._running.end()
        self._loop.close()

    def update_model_version(self, model_version: int) -> None:
        """Record the version of the server's current weights. Rows have the versions of their own tokens."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if playing has failed, or if the event loop does not respond within `stale_after_s`
        seconds.
        """
        if self._running is None:
            return
        failure = self._running.failure()
        if failure is not None and not isinstance(failure, CancelledError):
            reason = str(failure) or type(failure).__name__
            raise RuntimeError(f"no more rollouts from {self.url}: {reason}") from failure
        if not self._running.done() and not self._loop.answers(stale_after_s):
            raise RuntimeError(f"the rollouts from {self.url} have not responded for {stale_after_s:.0f} s")

    async def _play(self) -> None:
        """Play groups until this is cancelled. Raises the error that ends the worker."""
        outcomes = Outcomes(self.failures)
        async with executor_for(self._executor, self.url) as executor, AsyncClient(*self._address()) as client:
            delivery = Delivery(client, self.rollout_buffer, self._metrics, self._max_staleness)

            async def play_group(numbered: tuple[int, Any]) -> None:
                number, row = numbered
                results = await self._group(executor, self._groups.planner(number, row))
                outcomes.note(results)
                await delivery.deliver(number, results, lambda: self.model_version)

            await Scheduler(play_group, self._ahead).run(self._groups)

    async def _group(self, executor: Executor, planner: Planner) -> list[EpisodeResult]:
        """Play the episodes of a group; return their results in the order of the samples."""
        results: dict[int, EpisodeResult] = {}

        async def play(sample: int) -> None:
            results[sample] = await play_with_retries(executor, partial(planner, sample), self._retries, RETRIED)

        await Scheduler(play, self._groups.size).run(range(self._groups.size))
        return [results[sample] for sample in range(self._groups.size)]

    def _address(self) -> tuple[str, str | None]:
        return self._server.url, self._server.admin_key
