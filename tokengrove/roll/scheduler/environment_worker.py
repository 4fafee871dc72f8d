"""The environments of one worker. Each has a manager, which plays its episodes in its own thread.

A manager that fails is replaced by a new one, and its place in the group is given to any free environment. If an
environment fails three times in a row without a result, the run ends with its error.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from tokengrove.client.exit_reason import exit_reason
from tokengrove.errors import ProxyError
from tokengrove.roll.config import resolve
from tokengrove.roll.scheduler.restarts import Restarts
from tokengrove.roll.scheduler.together import Together
from tokengrove.roll.values import DataProto
from tokengrove.rollout.failure_log import TooManyFailedEpisodes

logger = logging.getLogger(__name__)
_STARTERS = 64


class OutputQueue(Protocol):
    """The methods of `GroupQueueManager` that a worker and its managers use."""

    def get_episode_id(self, group_id: int, env_id: int | None = None) -> int | None: ...

    def put(
        self,
        group_id: int,
        episode_id: int | None,
        start_step: int,
        rollout: DataProto | None,
        env_id: int | None = None,
    ) -> None: ...

    def give_back(self, group_id: int, env_id: int) -> int: ...

    def leave(self, group_id: int, env_id: int | None) -> None: ...


class EnvironmentWorker:
    """Plays the environments of `worker_config.env_configs[rank]`. Call `initialize`, then `run_rollout_loop`."""

    def __init__(self, worker_config: Any, rank: int = 0) -> None:
        self.worker_config = worker_config
        self.rank = rank
        self.env_configs: Mapping[int, Any] = worker_config.env_configs[rank]
        self.env_managers: dict[int, Any] = {}
        self.thread_lock = threading.Lock()
        self.output_queue: OutputQueue
        self._new_manager: Any = None
        self._step: tuple[int, Any] | None = None
        self._stopped = False
        self._playing = Together({})

    def initialize(
        self,
        pipeline_config: Any,
        generate_scheduler: Any,
        output_queue: OutputQueue,
        collator: Any = None,
        mode: str = "train",
        tokenizer: Any = None,
    ) -> None:
        """Create the managers, many at once.

        Each manager gets a copy of `tokenizer`, because tokenizers of transformers are not thread-safe. `collator`:
        passed to the managers unless it is None. Raises the exceptions of the managers' constructors.
        """
        self.output_queue = output_queue
        self._new_manager = partial(
            _new_manager,
            worker_config=self.worker_config,
            pipeline_config=pipeline_config,
            generate_scheduler=generate_scheduler,
            output_queue=output_queue,
            thread_lock=self.thread_lock,
            mode=mode,
            tokenizer=tokenizer,
            **({} if collator is None else {"collator": collator}),
        )
        with ThreadPoolExecutor(min(len(self.env_configs), _STARTERS) or 1) as starters:
            made = starters.map(lambda env_config: self._new_manager(env_config), self.env_configs.values())
            self.env_managers = dict(zip(self.env_configs, made, strict=True))

    def run_rollout_loop(self, seed: int) -> None:
        """Play all environments until the queue has no more episodes.

        If an environment fails for good, its exception is raised at once. The others continue until `stop`.
        """
        self._playing = Together(
            {f"tokengrove-env-{env_id}": partial(self._play, env_id, seed) for env_id in self.env_managers}
        )
        self._playing.run()

    def update_step(self, global_step: int, trace_meta: Any = None) -> None:
        """Pass the trainer's step to all managers."""
        self._step = (global_step, trace_meta)
        for manager in self.env_managers.values():
            manager.update_step(global_step, trace_meta)

    def stop(self) -> None:
        """Tell all managers to start no further episode."""
        self._stopped = True
        for manager in self.env_managers.values():
            manager.stop()

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the threads of all environments; return the names of those that still play after `timeout_s`
        seconds.
        """
        return self._playing.join(timeout_s)

    def _play(self, env_id: int, seed: int) -> None:
        group_id = self.env_configs[env_id]["group_id"]
        restarts = Restarts()
        while True:
            try:
                self.env_managers[env_id].run_rollout_loop(DataProto(meta_info={"seed": seed}))
                self.output_queue.leave(group_id, env_id)
                return
            except TooManyFailedEpisodes:
                raise
            except Exception as error:
                if self._stopped:
                    return
                if not restarts.allowed(self.output_queue.give_back(group_id, env_id)):
                    times = restarts.in_a_row
                    error.add_note(f"environment {env_id} has failed {times} times in a row without a result")
                    raise
                traced = not isinstance(error, ProxyError)  # its message says enough
                logger.warning(
                    "environment %d failed and is restarted: %s", env_id, exit_reason(error), exc_info=traced
                )
                self._begin_anew(env_id)

    def _begin_anew(self, env_id: int) -> None:
        manager = self._new_manager(self.env_configs[env_id])
        if self._step is not None:
            manager.update_step(*self._step)
        self.env_managers[env_id] = manager
        if self._stopped:
            manager.stop()


def _new_manager(env_config: Any, tokenizer: Any, **arguments: Any) -> Any:
    return resolve(env_config["env_manager_cls"], "env_manager_cls")(
        env_config=env_config, tokenizer=copy.deepcopy(tokenizer), **arguments
    )
