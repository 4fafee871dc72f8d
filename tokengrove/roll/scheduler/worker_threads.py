"""Workers in this process: environments are threads, and `system_envs` are set permanently in this process."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

from tokengrove.client import Client
from tokengrove.roll.config import resolve
from tokengrove.roll.scheduler.group_queue_manager import GroupQueueManager
from tokengrove.roll.scheduler.together import Together


class WorkerThreads:
    """A worker for each rank of `worker_config.env_configs`. `arguments`: those of `EnvironmentWorker.initialize`."""

    def __init__(self, queue: GroupQueueManager, client: Client, worker_config: Any, **arguments: Any) -> None:
        self._queue = queue
        os.environ.update(worker_config.system_envs)
        worker_class = resolve(worker_config.worker_cls, "worker_cls")
        self._workers = [worker_class(worker_config, rank) for rank in worker_config.env_configs]
        for worker in self._workers:
            worker.initialize(generate_scheduler=client, output_queue=queue, **arguments)
        self._playing = Together({})
        self._thread = threading.Thread()

    def start(self, seed: int) -> None:
        """Start all workers, which play until the queue ends or `stop` is called."""
        self._playing = Together(
            {
                f"tokengrove-worker-{number}": partial(worker.run_rollout_loop, seed)
                for number, worker in enumerate(self._workers)
            }
        )
        self._thread = threading.Thread(target=self._run, name="tokengrove-workers", daemon=True)
        self._thread.start()

    def update_step(self, global_step: int) -> None:
        """Pass the trainer's step to all managers."""
        for worker in self._workers:
            worker.update_step(global_step)

    def stop(self) -> None:
        """Tell all managers to start no further episode."""
        for worker in self._workers:
            worker.stop()

    def join(self, timeout_s: float = float("inf")) -> list[str]:
        """Wait until all have ended; return the names of the environments that still play after `timeout_s` seconds."""
        if self._thread.ident is None:
            return []
        until = time.monotonic() + timeout_s
        late = [name for worker in self._workers for name in worker.join(max(0.0, until - time.monotonic()))]
        if not late:
            self._playing.join(float("inf"))
            self._thread.join()
        return late

    def close(self) -> None:
        """Do nothing: no resources remain once all have ended."""

    def _run(self) -> None:
        try:
            self._playing.run()
        except BaseException as error:
            self._queue.fail(error)
