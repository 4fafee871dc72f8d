"""Environment managers, runners and filters that tests name in configurations; worker processes import them, too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np

from tokengrove.client.adapters.roll import trajectories
from tokengrove.roll.managers import BaseEnvManager, EpisodeSession
from tokengrove.roll.rock import shared_dataset
from tokengrove.roll.scheduler import EnvironmentWorker, GroupFilter
from tokengrove.roll.values import DataProto, EpisodeResult, Section

LENGTH = 96
"""Tokens of a row."""


class Player(BaseEnvManager):
    """Asks the model once in each episode, and scores it with the environment's number; `config.then` says what else.

    `raise`: fail in the first episode of each manager, `raise always` in all. `kill`: kill the process in the first
    episode, unless the file `config.told` exists, which is written before. `hang`: environment 0 waits for `released`.
    `data`: there are so many episodes. `tasks`: there is one for each task of this file.
    """

    failed = False
    task: Any = None
    released = threading.Event()

    def run_rollout_loop(self, data: DataProto) -> None:
        self.begin(data)
        while self.next_episode():
            assert self.episode_id is not None
            if self.episode_id >= self.env_config["config"].get("data", 1000):
                break
            if (tasks := self.env_config["config"].get("tasks")) is not None:
                self.task = shared_dataset(tasks, self.mode).get_data_item(self.episode_seed)
                if self.task is None:
                    break
            self.put(self.play())
        self.put(None)

    def play(self) -> DataProto:
        assert self.episode_id is not None and self.group_seed is not None
        episode = EpisodeSession.start(
            self.generate_scheduler,
            env_config=self.env_config,
            worker_config=self.worker_config,
            pipeline_config=self.pipeline_config,
            mode=self.mode,
            episode_id=self.episode_id,
            seed=self.episode_seed,
            group_seed=self.group_seed,
            step=self.start_step,
        )
        try:
            self.fail_as_told()
            self.ask(episode)
            episode.finish(EpisodeResult("Finished", self.env_config["env_id"]))
        except BaseException as error:
            episode.fail(error)
            raise
        return self.rollout(episode)

    def ask(self, episode: EpisodeSession) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": f"seed {self.episode_seed}"}], "max_tokens": 8}
        with self.generate_scheduler.http_client() as http:
            told = {"authorization": f"Bearer {episode.api_key}"}
            answer: httpx.Response = http.post(f"{episode.base_url}/v1/chat/completions", json=body, headers=told)
            answer.raise_for_status()

    def rollout(self, episode: EpisodeSession) -> DataProto:
        export = episode.exported("concat")
        fields = trajectories(export.samples, sessions=export.sessions, sequence_length=LENGTH)
        told = {**fields.meta_info, "session_id": episode.session.session_id}
        told["metrics"] = {"env/length": 8, "env/id_max": self.env_config["env_id"]}
        extra = {
            "seed": np.array([self.episode_seed], dtype=object),
            "task": np.array([(self.task or {}).get("name")], dtype=object),
            "pid": np.array([os.getpid()], dtype=object),
            "start_step": np.array([self.start_step], dtype=object),
        }
        return DataProto(fields.batch, {**fields.non_tensor_batch, **extra}, told)

    def fail_as_told(self) -> None:
        config = self.env_config["config"]
        then = config.get("then")
        if then == "raise" and not self.failed:
            type(self).failed = True
            raise ZeroDivisionError("the environment failed")
        if then == "raise always":
            raise ZeroDivisionError("the environment always fails")
        if then == "kill" and self.env_config["env_id"] == 0 and not Path(config["told"]).exists():
            Path(config["told"]).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        if then == "hang" and self.env_config["env_id"] == 0:
            self.released.wait()
        if then == "kill always":
            os.kill(os.getpid(), signal.SIGKILL)


class DropsFirst(GroupFilter):
    """Drops the episode 0 of every group."""

    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        assert self.mode == "train"
        return episode_id == 0


class OwnWorker(EnvironmentWorker):
    """A worker of the user's, as `worker_cls` names it."""

    def update_step(self, global_step: int, trace_meta: Any = None) -> None:
        os.environ["ROLL_PLAYERS_STEP"] = str(global_step)
        super().update_step(global_step, trace_meta)


def path_of(thing: type) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def settings(
    groups: int = 2, size: int = 2, redundancy: int = 0, workers: int = 1, manager: type = Player, **changes: Any
) -> SimpleNamespace:
    """As AgenticConfig makes it; `changes` are further fields, `env` is the config of each environment."""
    final = size + redundancy
    env = changes.pop("env", {})
    entries = {
        env_id: Section(
            tag=f"tag{env_id // final % 2}",
            group_id=env_id // final,
            env_id=env_id,
            group_seed=1000 * (env_id // final),
            max_tokens_per_step=8,
            config=env,
            env_manager_cls=path_of(manager),
        )
        for env_id in range(groups * final)
    }
    each = -(-len(entries) // workers)
    managers = SimpleNamespace(
        group_size=size,
        group_size_redundancy=redundancy,
        max_traj_per_env=1,
        env_configs={
            rank: {env_id: entry for env_id, entry in entries.items() if env_id // each == rank}
            for rank in range(workers)
        },
        group_filter_cls=path_of(changes.pop("group_filter", GroupFilter)),
        worker_cls=path_of(changes.pop("worker", EnvironmentWorker)),
        system_envs={"ROLL_PLAYERS": "set"},
        generating_args=None,
    )
    values = {
        "exp_name": "players",
        "seed": 42,
        "sequence_length": LENGTH,
        "rollout_batch_size": groups * size,
        "val_batch_size": groups * size,
        "async_generation_ratio": 0,
        "max_steps": 2,
        "eval_steps": 0,
        "rollout_dump_dir": None,
        "env_monitor": SimpleNamespace(enable=True, monitor_interval=30, hung_timeout=3600),
        "train_env_manager": managers,
        "val_env_manager": managers,
    }
    return SimpleNamespace(**values | changes)
