"""Serves the queue to worker processes: calls of `GroupQueueManager` over local connections, one for each thread.

Calls may wait as long as in this process. Each episode is sent with the trainer's step, so that it does not begin with
an older one.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

from tokengrove.roll.rock import place_for_others
from tokengrove.roll.scheduler.group_queue_manager import GroupQueueManager
from tokengrove.roll.values import DataProto

logger = logging.getLogger(__name__)
_BACKLOG = 1024
_END_S = 10.0


class Address(NamedTuple):
    """The address of a served queue, and its key."""

    address: Any
    key: bytes


class QueueServer:
    """Serves a queue to other processes of this machine until `close`."""

    def __init__(self, queue: GroupQueueManager) -> None:
        self._queue = queue
        key = secrets.token_bytes(32)
        self._listener = Listener(backlog=_BACKLOG, authkey=key)
        self.address = Address(self._listener.address, key)
        self._closed = False
        self._serving: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="tokengrove-queue", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no more connections, and wait up to 10 s for the end of each open connection."""
        self._closed = True
        try:
            Client(self.address.address, authkey=self.address.key).close()  # wakes the thread that accepts
        except OSError:
            logger.debug("the queue's listener was already closed")
        self._accepting.join()
        self._listener.close()
        for thread in self._serving:
            thread.join(_END_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:  # a process that was killed while it connected, or one with a wrong key
                logger.debug("a connection to the queue was not completed", exc_info=True)
                continue
            serving = threading.Thread(target=self._serve, args=[connection], name="tokengrove-queue-call", daemon=True)
            serving.start()
            self._serving = [*(each for each in self._serving if each.is_alive()), serving]

    def _serve(self, connection: Connection[Any, Any]) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "episode": self._episode,
            "put": self._queue.put,
            "give_back": self._queue.give_back,
            "leave": self._queue.leave,
            "wait_closed": self._queue.wait_closed,
            "place": place_for_others,
        }
        with connection:
            try:
                while True:
                    name, arguments = connection.recv()
                    connection.send(calls[name](*arguments))
            except (EOFError, OSError):
                return  # the process has ended; the process that started it releases its episodes

    def _episode(self, group_id: int, env_id: int | None) -> tuple[int | None, int | None]:
        episode_id = self._queue.get_episode_id(group_id, env_id)
        return episode_id, self._queue.current_step


class RemoteQueue:
    """The queue of another process, with the methods that workers and managers use.

    `update_step` is called when an episode comes with a later step than those before.
    """

    counts_failures = True
    """The queue logs failed episodes in its own process."""

    def __init__(self, address: Address, update_step: Callable[[int], None]) -> None:
        self._address = address
        self._update_step = update_step
        self._own = threading.local()
        self._lock = threading.Lock()
        self._step: int | None = None

    def get_episode_id(self, group_id: int, env_id: int | None = None) -> int | None:
        episode_id, step = self._call("episode", group_id, env_id)
        with self._lock:
            if step is not None and (self._step is None or step > self._step):
                self._step = step
                self._update_step(step)
        return None if episode_id is None else int(episode_id)

    def put(
        self,
        group_id: int,
        episode_id: int | None,
        start_step: int,
        rollout: DataProto | None,
        env_id: int | None = None,
    ) -> None:
        self._call("put", group_id, episode_id, start_step, rollout, env_id)

    def give_back(self, group_id: int, env_id: int) -> int:
        return int(self._call("give_back", group_id, env_id))

    def leave(self, group_id: int, env_id: int | None) -> None:
        self._call("leave", group_id, env_id)

    def place(self, mode: str, dataset_name: str, seed: int) -> int:
        """The position of a seed in the traversal of a dataset, which all workers share."""
        return int(self._call("place", mode, dataset_name, seed))

    def wait_closed(self) -> None:
        """Wait until the queue is shut down."""
        self._call("wait_closed")

    def _call(self, name: str, *arguments: Any) -> Any:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = Client(self._address.address, authkey=self._address.key)
        connection.send((name, arguments))
        return connection.recv()
