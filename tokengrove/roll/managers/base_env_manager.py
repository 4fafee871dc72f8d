"""The base of all environment managers: one environment's place in a group, its seeds, and its use of the queue."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tokengrove.roll.values.data_proto import DataProto
from tokengrove.roll.values.section import as_section
from tokengrove.roll.values.step_limit import env_step_limit
from tokengrove.rollout.failure_log import FailedEpisode, FailureLog

logger = logging.getLogger(__name__)
_said: set[str] = set()


class BaseEnvManager:
    """Plays episodes of one environment, in its own thread, until the queue has no more.

    The arguments are those of all managers, in ROLL's order: `generate_scheduler` is a `tokengrove.Client` that may
    start sessions, `tokenizer` may be None, and `output_queue` has `get_episode_id(group_id, env_id) -> int | None` and
    `put(group_id, episode_id, start_step, rollout, env_id)`. `thread_lock` is used if the environment's
    `use_thread_lock` is true, and `env_step_limiter` around its steps. A subclass with its own state may call
    `super().__init__()` without arguments.

    The rollout of a failed episode has `meta_info["failure"]`, the fields of a `FailedEpisode`. If the queue has
    `counts_failures`, it logs and counts them; otherwise the manager does, and its loop ends after
    `max_failed_episodes` in a row.

    ROLL's other arguments, such as `processor` or `collator`, have no effect here, since the server renders prompts.
    Each is logged once.

    `current_step` is the trainer's step, -1 before the first. `running`: whether episodes are played. `group_seed`,
    `episode_id` and `start_step` are those of the running episode.
    """

    def __init__(
        self,
        worker_config: Any = None,
        pipeline_config: Any = None,
        env_config: Any = None,
        tokenizer: Any = None,
        generate_scheduler: Any = None,
        output_queue: Any = None,
        thread_lock: AbstractContextManager[Any] | None = None,
        mode: str = "train",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        configs = (worker_config, pipeline_config, env_config)
        self.worker_config, self.pipeline_config, self.env_config = map(as_section, configs)
        self.tokenizer, self.generate_scheduler, self.output_queue = tokenizer, generate_scheduler, output_queue
        self.mode = mode
        self.current_step = -1
        self.trace_meta: Any = None
        self.running = False
        self.group_seed: int | None = None
        self.episode_id: int | None = None
        self.start_step = -1
        self._failures: FailureLog | None = None
        given = {} if env_config is None else env_config
        self.use_thread_lock = bool(given.get("use_thread_lock", False))
        locked = self.use_thread_lock and thread_lock is not None
        self.thread_lock: AbstractContextManager[Any] = thread_lock if locked and thread_lock else nullcontext()
        self.env_step_limiter = env_step_limit(given, mode)
        _say_unused({f"argument {9 + at}": value for at, value in enumerate(args)} | kwargs)

    @property
    def is_discounted(self) -> bool:
        """Whether scores are returns: `apply_reward_discount` of the pipeline."""
        return bool(getattr(self.pipeline_config, "apply_reward_discount", False))

    @classmethod
    def session_options(cls, env_config: Any, worker_config: Any) -> dict[str, Any]:
        """Further fields of `start_session` for the episodes of an environment, such as how the model answers."""
        return {}

    def run_rollout_loop(self, data: DataProto) -> None:
        """Play episodes until the queue has no more; `data.meta_info["seed"]` is the seed of the run."""
        raise NotImplementedError(f"{type(self).__name__} has no run_rollout_loop")

    def update_step(self, global_step: int, trace_meta: Any = None) -> None:
        """Set the trainer's step: episodes that start from now on belong to it."""
        self.current_step = global_step
        self.trace_meta = trace_meta

    def stop(self) -> None:
        """Play no more episodes. The manager decides whether the running episode continues."""
        self.running = False

    def begin(self, data: DataProto) -> None:
        """Begin a run. All environments of a group have the same `group_seed`. Raises ValueError without a seed."""
        if "seed" not in data.meta_info:
            raise ValueError("data.meta_info has no 'seed', the seed of the run")
        self.group_seed = int(data.meta_info["seed"]) + int(self.env_config["group_seed"])
        self.running = True

    def next_episode(self) -> bool:
        """Wait for an episode of the queue. Return False if there is none, or if the manager was stopped."""
        self.start_step = self.current_step
        if not self.running:
            self.episode_id = None
            return False
        self.episode_id = self.output_queue.get_episode_id(self.env_config["group_id"], self.env_config["env_id"])
        self.start_step = self.current_step
        return self.episode_id is not None

    @property
    def episode_seed(self) -> int:
        """The seed of the running episode, which all environments of its group share."""
        if self.group_seed is None or self.episode_id is None:
            raise ValueError("no episode is running: call begin and next_episode first")
        return self.group_seed + self.episode_id

    def put(self, rollout: DataProto | None) -> None:
        """Put the episode's rollout into the queue; None: this environment has no more.

        Raises TooManyFailedEpisodes at the limit of failed episodes in a row, if the queue does not count them.
        """
        place, env_id = self.env_config["group_id"], self.env_config["env_id"]
        self.output_queue.put(place, self.episode_id, self.start_step, rollout, env_id)
        if rollout is None or getattr(self.output_queue, "counts_failures", False):
            return
        if self._failures is None:
            most = getattr(self.pipeline_config, "max_failed_episodes", None)
            self._failures = FailureLog(most, getattr(self.worker_config, "group_size", 1), f"{self.mode}: an episode")
        self._failures.note(FailedEpisode.told_in(getattr(rollout, "meta_info", {})))


def say_once(line: str, log: logging.Logger = logger) -> None:
    """Log a warning once per process."""
    if line not in _said:
        _said.add(line)
        log.warning("%s", line)


def _say_unused(arguments: dict[str, Any]) -> None:
    for name in [name for name, value in arguments.items() if value is not None]:
        say_once(f"{name} of an environment manager has no effect here: the server renders prompts")
