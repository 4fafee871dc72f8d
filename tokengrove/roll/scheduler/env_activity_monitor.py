"""Warns about environments that have been playing the same episode for too long."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
_MOST = 5


class HungEnvironment(NamedTuple):
    group_id: int
    env_id: int
    episode_id: int
    inactive_seconds: int

    def __str__(self) -> str:
        return f"environment {self.env_id} (episode {self.episode_id}, {self.inactive_seconds} s)"


class EnvActivityMonitor:
    """Every `config.monitor_interval` seconds, warns about environments that hang.

    An environment hangs if its episode began more than `config.hung_timeout` seconds ago. With `config.enable` false,
    nothing is recorded and no warning is logged. `clock` returns seconds.
    """

    def __init__(self, config: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.enable = bool(config.enable)
        self.monitor_interval = config.monitor_interval
        self.hung_timeout = config.hung_timeout
        self._clock = clock
        self._began: dict[tuple[int, int], tuple[int, float]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def record_episode_start(self, group_id: int, env_id: int, episode_id: int) -> None:
        """Record that an environment has received an episode."""
        if self.enable:
            self._began[group_id, env_id] = (episode_id, self._clock())

    def record_end(self, group_id: int, env_id: int) -> None:
        """Record that an environment has put its result, has given its place back, or has left."""
        self._began.pop((group_id, env_id), None)

    def start_monitoring(self) -> None:
        """Start the thread that checks the environments."""
        if self.enable and self._thread is None:
            self._thread = threading.Thread(target=self._look, name="tokengrove-env-monitor", daemon=True)
            self._thread.start()

    def stop_monitoring(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def check_and_log_hung_envs(self) -> list[HungEnvironment]:
        """Log a warning for each group with environments that hang, and return these environments."""
        now = self._clock()
        by_group = defaultdict(list)
        for (group_id, env_id), (episode_id, began) in list(self._began.items()):
            if now - began > self.hung_timeout:
                by_group[group_id].append(HungEnvironment(group_id, env_id, episode_id, int(now - began)))
        for group_id, hung in by_group.items():
            shown = ", ".join(map(str, hung[:_MOST]))
            more = f" and {len(hung) - _MOST} more" if len(hung) > _MOST else ""
            logger.warning("group %d has %d environments that hang: %s%s", group_id, len(hung), shown, more)
        return [each for hung in by_group.values() for each in hung]

    def _look(self) -> None:
        while not self._stopped.wait(self.monitor_interval):
            self.check_and_log_hung_envs()
