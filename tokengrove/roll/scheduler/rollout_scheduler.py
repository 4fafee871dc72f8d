"""Batches for a trainer: environments play continuously, and `get_batch` takes whole groups of their results.

The scheduler delivers its sessions, so no claim gets them. The session of a discarded result (late, filtered, expired
or unread) is withdrawn, so exports leave it out unless they name it.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from tokengrove.client import Client, operations
from tokengrove.client.asgi import ASGIApp
from tokengrove.client.retries import LEAVE_S
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.roll.scheduler.batch_metrics import append_to_dict
from tokengrove.roll.scheduler.group_queue_manager import GroupQueueManager
from tokengrove.roll.scheduler.rollout_mock import RolloutMock
from tokengrove.roll.scheduler.worker_processes import WorkerProcesses
from tokengrove.roll.scheduler.worker_threads import WorkerThreads
from tokengrove.roll.values import DataProto

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """The interface of the workers, in this process or in others."""

    def start(self, seed: int) -> None: ...

    def update_step(self, global_step: int) -> None: ...

    def stop(self) -> None: ...

    def join(self, timeout_s: float = ...) -> list[str]: ...

    def close(self) -> None: ...


class RolloutScheduler:
    """Plays the environments of `env_manager_config` against a server. Use it in a `with` block, or call `shutdown`.

    The server is that of `client`, or of `url` and `admin_key`, or `app` in this process. Each environment is a thread.
    Several workers (`max_env_num_per_worker`) run in their own processes, at most `processes` of them (default: the
    number of processors). They run in this process if `processes` is 0 or the server is an app of this process.

    `mode`: `train`, or `val`, whose sessions count as validation. `seed`: the base of all seeds; default:
    `config.seed`, or a random number for training if the configuration gives none. The seed of an episode is base +
    group_seed + episode id.

    `resource_manager` and `infer_cluster` are ROLL's and have no effect: the server runs the engine. `tokenizer` and
    `collator` are passed to the managers.

    After `max_failed_episodes` failed episodes in a row (default: the limit of the configuration, else three groups;
    -1: no limit), `get_batch` raises TooManyFailedEpisodes.
    """

    def __init__(
        self,
        config: Any,
        env_manager_config: Any,
        resource_manager: Any = None,
        infer_cluster: Any = None,
        mode: str = "train",
        collator: Any = None,
        *,
        url: str | None = None,
        admin_key: str | None = None,
        app: ASGIApp | None = None,
        client: Client | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        processes: int | None = None,
        max_failed_episodes: int | None = None,
    ) -> None:
        if mode not in ("train", "val"):
            raise InvalidRequest(f"mode is {mode!r}; it must be 'train' or 'val'", param="mode")
        if env_manager_config is None:
            field = "train_env_manager" if mode == "train" else "val_env_manager"
            raise InvalidRequest(f"env_manager_config is None: the configuration has no {field}", param=field)
        if resource_manager is not None or infer_cluster is not None:
            logger.info("resource_manager and infer_cluster have no effect: the server runs the engine")
        self.config, self.env_manager_config, self.mode = config, env_manager_config, mode
        self._owns_client = client is None
        self._client = client or Client(url, admin_key, app=app)
        self._arguments = {"pipeline_config": config, "mode": mode, "collator": collator, "tokenizer": tokenizer}
        alone = self._client.app is not None or len(env_manager_config.env_configs) < 2
        self._processes = 0 if alone else (os.cpu_count() or 1) if processes is None else processes
        self._seed = seed
        self._mock = RolloutMock(getattr(config, "rollout_mock", None), mode)
        self._workers: Workers | None = None
        self._suspended = False
        self._plays = False
        self.env_output_queue = GroupQueueManager(
            config,
            env_manager_config,
            mode,
            on_discard=lambda reason, rollouts: self._withdraw(rollouts),
            max_failed_episodes=max_failed_episodes,
        )

    def __enter__(self) -> RolloutScheduler:
        try:
            self.initialize()
        except BaseException:
            self.shutdown()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def initialize(self) -> None:
        """Create the workers; otherwise the first `get_batch` does.

        Environments in this process are created here, and the exceptions of their constructors are raised. Worker
        processes start with the first `get_batch`, which raises their exceptions.
        """
        if not self._mock.loads:
            self._made_workers()

    def get_batch(self, data: DataProto, batch_size: int) -> DataProto | None:
        """Wait for a batch of `batch_size` episodes, in whole groups, for the step `data.meta_info["global_step"]`.

        Negative `batch_size`: all episodes until the data end; the environments restart with the next call. There are
        fewer episodes if the step or the data have no more. None: the data have ended. A pause by `suspend` ends here.

        `meta_info["metrics"]` has the metrics of the episodes as lists, which `reduce_metrics` reduces to numbers.
        `meta_info["failed_episodes"]` is the number of failed episodes, also in the metric `scheduler/failed_episodes`.
        `meta_info["failed"]` has the type, message, task, session and traceback of each.

        Raises InvalidRequest for a `batch_size` of 0, the exception of an environment that failed several times without
        a result, and TooManyFailedEpisodes, with the reasons, at the limit of failed episodes in a row.
        """
        if batch_size == 0:
            raise InvalidRequest(
                "batch_size is 0; it must be positive, or negative for all episodes", param="batch_size"
            )
        global_step = data.meta_info["global_step"]
        if self._mock.loads:
            return self._mock.load(global_step)
        rollouts = self._rollouts(global_step, batch_size)
        if not rollouts:
            return None
        batch = self._joined(rollouts)
        batch.meta_info["global_step"] = global_step
        self._mock.dump(global_step, batch)
        return batch

    def suspend(self) -> None:
        """Pause the engine until the next `get_batch` or `shutdown`.

        Requests that are running are interrupted. Their tokens are kept, and sampling continues after the pause.
        """
        self._client.pause()
        self._suspended = True

    def shutdown(self, timeout_s: float = 60.0) -> None:
        """End all environments, threads and processes. Running episodes have `timeout_s` seconds to end.

        After that, worker processes are killed. A thread cannot be killed: it is named in the log, and does not keep
        the program from exiting.
        """
        if self._workers is not None:
            self._workers.stop()
        self.env_output_queue.shutdown()
        if self._suspended:  # an environment whose request waits for the paused engine would not end
            try:
                self._resume(LEAVE_S)
            except ProxyError as error:
                logger.warning("the engine could not be continued and stays paused: %s", error)
        if self._workers is not None:
            workers, self._workers = self._workers, None
            if late := workers.join(timeout_s):
                logger.warning("%s: still playing after %g s: %s", self.mode, timeout_s, ", ".join(late))
            workers.close()
        if self._owns_client:
            self._client.close()

    def _rollouts(self, global_step: int, batch_size: int) -> list[DataProto]:
        workers = self._made_workers()
        workers.update_step(global_step)
        self.env_output_queue.advance_step(global_step)
        if not self._plays:
            workers.start(self._base_seed())
            self._plays = True
        self._resume()
        rollouts = self.env_output_queue.get_batch(batch_size, global_step)
        if batch_size < 0:
            workers.join()
            self._plays = False
            self.env_output_queue.clear()
        return rollouts

    def _resume(self, within_s: float | None = None) -> None:
        self._suspended = False
        if self._client.run(operations.engine(), retry_s=within_s).paused:
            self._client.run(operations.engine_step("continue_generation", {}), retry_s=within_s)

    def _made_workers(self) -> Workers:
        if self.env_output_queue.closed:
            raise RuntimeError("the scheduler was shut down; create a new one")
        if self._workers is None:
            given = (self.env_output_queue, self._client, self.env_manager_config)
            if self._processes:
                self._workers = WorkerProcesses(*given, self._processes, **self._arguments)
            else:
                self._workers = WorkerThreads(*given, **self._arguments)
        return self._workers

    def _base_seed(self) -> int:
        if self._seed is not None:
            return self._seed
        if self.mode == "train" and not getattr(self.config, "seed_is_given", False):
            return random.randint(0, 1_000_000)
        return int(self.config.seed)

    def _joined(self, rollouts: Sequence[DataProto]) -> DataProto:
        metrics: dict[str, Any] = {}
        returned_at = time.time()
        for rollout in rollouts:
            returned_at = rollout.meta_info.pop("get_batch_return_start_time")
            append_to_dict(metrics, rollout.meta_info.get("metrics", {}))
        metrics["time/get_batch_cost_gqm"] = time.time() - returned_at
        metrics |= self.env_output_queue.collect_metrics()
        failed = [failure for rollout in rollouts if (failure := rollout.meta_info.pop("failure", None)) is not None]
        metrics["scheduler/failed_episodes"] = len(failed)
        names = _session_ids(rollouts)
        batch: DataProto = type(rollouts[0]).concat(list(rollouts))  # a single rollout is the batch itself
        batch.meta_info.pop("session_id", None)
        batch.meta_info["session_ids"] = names
        batch.meta_info["metrics"] = metrics
        batch.meta_info["failed_episodes"], batch.meta_info["failed"] = len(failed), failed
        batch.meta_info["get_batch_return_start_time"] = time.time()
        return batch

    def _withdraw(self, rollouts: Sequence[DataProto]) -> None:
        """Withdraw the sessions of discarded rollouts, so that they count in no group. Errors are logged."""
        names = _session_ids(rollouts)
        try:
            for name in names:
                self._client.withdraw_session(name)
        except ProxyError as error:
            logger.warning("%d sessions could not be withdrawn: %s", len(names), error)


def _session_ids(rollouts: Sequence[DataProto]) -> list[str]:
    found = (rollout.meta_info.get("session_id") for rollout in rollouts)
    return [name for name in found if name is not None]
