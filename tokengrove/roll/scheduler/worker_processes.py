"""Workers in their own processes. A process that dies is restarted.

Its episodes are given to other environments at once, and its sessions end as Failed on the server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from tokengrove.client import Client, operations
from tokengrove.client.exit_reason import exit_reason
from tokengrove.client.operations import Call, Steps
from tokengrove.client.options import SessionFilter
from tokengrove.client.retries import LEAVE_S
from tokengrove.errors import EndedOtherwise, ProxyError, SessionNotFound
from tokengrove.roll.scheduler.group_queue_manager import GroupQueueManager
from tokengrove.roll.scheduler.queue_server import QueueServer
from tokengrove.roll.scheduler.restarts import Restarts
from tokengrove.roll.scheduler.worker_process import WORKER, run_workers
from tokengrove.rollout.failures import WorkerDied
from tokengrove.rollout.processes import ProcessPool
from tokengrove.rollout.scheduler import Scheduler
from tokengrove.rollout.threads import in_thread

logger = logging.getLogger(__name__)


class WorkerProcesses:
    """Runs the ranks of `worker_config.env_configs` in at most `processes` processes, with several ranks in one if
    needed.

    `arguments`: further arguments of `run_workers`.
    """

    def __init__(
        self, queue: GroupQueueManager, client: Client, worker_config: Any, processes: int, **arguments: Any
    ) -> None:
        self._queue, self._client, self._worker_config, self._arguments = queue, client, worker_config, arguments
        ranks = list(worker_config.env_configs)
        each = -(-len(ranks) // processes)
        self._shares = [ranks[first : first + each] for first in range(0, len(ranks), each)]
        self._name = uuid.uuid4().hex
        self._pool = ProcessPool(len(self._shares))
        self._server = QueueServer(queue)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduler: Scheduler[list[int]] | None = None
        self._thread = threading.Thread()
        self._stopped = False
        self._deaths: dict[int, str] = {}

    def start(self, seed: int) -> None:
        """Start all workers, which play until the queue ends or is shut down."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._play_all(seed)), name="tokengrove-workers", daemon=True
        )
        self._thread.start()

    def update_step(self, global_step: int) -> None:
        """Do nothing: a worker gets the step with its next episode."""

    def stop(self) -> None:
        """Restart no worker. Running workers stop with their queue."""
        self._stopped = True

    def join(self, timeout_s: float | None = None) -> list[str]:
        """Wait until all workers have ended.

        If they have not ended after `timeout_s` seconds (None: no limit), kill them, end the sessions of all of them,
        and return the names of all processes.
        """
        if self._thread.ident is None:
            return []
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return []
        if self._loop is not None and self._scheduler is not None:
            with suppress(RuntimeError):  # the loop is closed: all have ended
                self._loop.call_soon_threadsafe(self._scheduler.stop)
        self._thread.join()
        for ranks in self._shares:
            self._end_sessions(ranks, "the worker was killed because it did not end in time")
        return [_names(ranks) for ranks in self._shares]

    def close(self) -> None:
        """End the processes and the server of the queue.

        Also ends sessions whose start was still on its way to the server when their worker died.
        """
        try:
            self._pool.close()
            self._end_late_sessions()
        finally:
            self._server.close()

    def _end_late_sessions(self) -> None:
        for ranks in self._shares:
            reason = self._deaths.get(ranks[0])
            if reason is not None and not self._end_sessions(ranks, reason, LEAVE_S):
                return

    async def _play_all(self, seed: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduler = Scheduler(partial(self._play, seed=seed), len(self._shares))
        try:
            await self._scheduler.run(self._shares)
        except Exception as error:  # otherwise `get_batch` would wait for ever
            self._queue.fail(error)

    async def _play(self, ranks: list[int], seed: int) -> None:
        """Run the workers of a process until they end, or until the process has died too often without a result."""
        restarts = Restarts()
        while True:
            try:
                return await self._run_once(ranks, seed)
            except WorkerDied as error:
                reason = self._deaths[ranks[0]] = exit_reason(error)
                await in_thread(partial(self._end_sessions, ranks, reason))
                if self._stopped:
                    return None
                if not restarts.allowed(self._queue.release(self._environments(ranks))):
                    error.add_note(f"{_names(ranks)} has died {restarts.in_a_row} times in a row without a result")
                    return self._queue.fail(error)
                logger.warning("%s died and is restarted: %s", _names(ranks), error)
            except Exception as error:
                return self._queue.fail(error)

    async def _run_once(self, ranks: list[int], seed: int) -> None:
        await self._pool.run(
            run_workers,
            variables=self._worker_config.system_envs,
            address=self._server.address,
            url=self._client.url,
            admin_key=self._client.admin_key,
            name=self._label(ranks),
            worker_config=self._worker_config,
            ranks=ranks,
            seed=seed,
            **self._arguments,
        )

    def _environments(self, ranks: list[int]) -> list[tuple[int, int]]:
        configs = (self._worker_config.env_configs[rank] for rank in ranks)
        return [(each["group_id"], env_id) for entries in configs for env_id, each in entries.items()]

    def _label(self, ranks: list[int]) -> str:
        return f"{self._name}-{ranks[0]}"

    def _end_sessions(self, ranks: list[int], reason: str, within_s: float | None = None) -> bool:
        """End the active sessions of a dead process as Failed, so that nobody waits for them.

        `within_s`: seconds of retries of each call; None: the client's default. Return False if the server failed.
        """
        active: SessionFilter = {"status": "active", "metadata": {WORKER: self._label(ranks)}}
        try:
            for session in self._client.run(operations.sessions(active), retry_s=within_s):
                with suppress(EndedOtherwise, SessionNotFound):  # it has already ended
                    self._client.run(_ended(str(session["session_id"]), reason), retry_s=within_s)
        except ProxyError as failure:
            logger.warning("the sessions of %s could not be ended: %s", _names(ranks), failure)
            return False
        return True


def _names(ranks: list[int]) -> str:
    return f"the process of worker {', '.join(map(str, ranks))}"


def _ended(session_id: str, reason: str) -> Steps[None]:
    yield Call(
        "POST",
        f"/{quote(session_id, safe='')}/rl/end_session",
        {"outcome": "Failed", "exit_reason": reason},
    )
