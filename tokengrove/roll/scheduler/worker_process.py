"""The code of a worker process: it creates workers and plays their episodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from tokengrove.client import Client, Session
from tokengrove.client.options import SessionOptions
from tokengrove.roll.config import resolve
from tokengrove.roll.rock import traverse_together
from tokengrove.roll.scheduler.queue_server import Address, RemoteQueue
from tokengrove.roll.scheduler.together import Together

WORKER = "worker"
"""The key in a session's metadata for the name of its worker, by which the sessions of a dead worker are found."""


class WorkerClient(Client):
    """A client that adds the name of its worker to the metadata of the sessions that it starts."""

    def __init__(self, url: str, admin_key: str | None, name: str) -> None:
        super().__init__(url, admin_key)
        self._name = name

    def start_session(
        self,
        task_id: str,
        *,
        idempotency_key: str | None = None,
        retry_s: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Like `Client.start_session`."""
        metadata: Mapping[str, Any] = options.get("metadata") or {}
        options["metadata"] = {**metadata, WORKER: self._name}
        return super().start_session(task_id, idempotency_key=idempotency_key, retry_s=retry_s, **options)


def run_workers(
    address: Address,
    url: str,
    admin_key: str | None,
    name: str,
    pipeline_config: Any,
    worker_config: Any,
    ranks: Sequence[int],
    mode: str,
    seed: int,
    collator: Any,
    tokenizer: Any,
) -> None:
    """Create the workers of `ranks`, and play until the queue ends or is shut down."""
    worker_class = resolve(worker_config.worker_cls, "worker_cls")
    workers = [worker_class(worker_config, rank) for rank in ranks]

    def update_step(step: int) -> None:
        for worker in workers:
            worker.update_step(step)

    with WorkerClient(url, admin_key, name) as client:
        queue = RemoteQueue(address, update_step)
        traverse_together(queue.place)
        for worker in workers:
            worker.initialize(pipeline_config, client, queue, collator=collator, mode=mode, tokenizer=tokenizer)
        threading.Thread(target=_stop_with, args=[queue, workers], name="tokengrove-stop", daemon=True).start()
        Together({f"tokengrove-worker-{each.rank}": partial(each.run_rollout_loop, seed) for each in workers}).run()


def _stop_with(queue: RemoteQueue, workers: Sequence[Any]) -> None:
    try:
        queue.wait_closed()
    except (EOFError, OSError):
        return  # the program has ended, and this process ends with it
    for worker in workers:
        worker.stop()
