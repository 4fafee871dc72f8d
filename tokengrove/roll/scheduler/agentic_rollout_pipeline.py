"""Runs the steps of a configuration: a training batch in each step, and a validation every `eval_steps` steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tokengrove.client import Client
from tokengrove.client.asgi import ASGIApp
from tokengrove.roll.rock import reset_datasets
from tokengrove.roll.scheduler.batch_metrics import reduce_metrics, train_metrics, val_metrics
from tokengrove.roll.scheduler.rollout_scheduler import RolloutScheduler
from tokengrove.roll.scheduler.trajectory_dump import check_dump_path, dump_rollout_trajectories
from tokengrove.roll.values import DataProto

logger = logging.getLogger(__name__)


class RolloutStep(NamedTuple):
    """One global step: its number, its training batch, and the metrics of the batch and of the validation."""

    global_step: int
    batch: DataProto
    metrics: dict[str, Any]


class AgenticRolloutPipeline:
    """Runs the rollouts of `pipeline_config`, for `max_steps` steps; -1: until the data end.

    In step 0 and every `eval_steps` steps after it, the environments of `val_env_manager`, if there are any, play a
    validation batch before the training batch. The trajectories of training batches are written to `rollout_dump_dir`,
    and those of validations to its folder `val`.

    Metrics have ROLL's names: `rollout/score/mean`, `rollout/TAG/score/mean`, `val/score/mean`, `val/TAG/score/mean`,
    the same with `max` and `min`, and the metrics that the episodes report. The address of the server and all other
    keyword arguments are those of `RolloutScheduler`. The schedulers of training and validation share one client.
    """

    def __init__(
        self,
        pipeline_config: Any,
        *,
        url: str | None = None,
        admin_key: str | None = None,
        app: ASGIApp | None = None,
        client: Client | None = None,
        **options: Any,
    ) -> None:
        check_dump_path(pipeline_config.rollout_dump_dir)
        self.pipeline_config = pipeline_config
        self._url, self._admin_key, self._app, self._client = url, admin_key, app, client
        self._options = options

    def run(self) -> list[dict[str, Any]]:
        """Run all steps; return the metrics of each."""
        return [step.metrics for step in self.steps()]

    def steps(self) -> Iterator[RolloutStep]:
        """Run the steps one by one. Between two steps, the trainer may train the batch and update the weights.

        With `async_generation_ratio` above 0, the environments continue to play in the meantime. They all stop when the
        iterator ends.
        """
        config = self.pipeline_config
        with ExitStack() as stack:
            client = self._client or stack.enter_context(Client(self._url, self._admin_key, app=self._app))
            train = stack.enter_context(
                RolloutScheduler(config, config.train_env_manager, client=client, mode="train", **self._options)
            )
            val = None
            for global_step in count() if config.max_steps == -1 else range(config.max_steps):
                metrics: dict[str, Any] = {}
                if self._validates(global_step):
                    val = val or stack.enter_context(
                        RolloutScheduler(config, config.val_env_manager, client=client, mode="val", **self._options)
                    )
                    metrics |= self._validated(val, global_step)
                batch = self._batch(train, global_step, metrics)
                if batch is None:
                    level = logging.INFO if global_step else logging.WARNING  # no episode was played
                    logger.log(level, "the data ended before step %d", global_step)
                    return
                yield RolloutStep(global_step, batch, metrics)

    def _validates(self, global_step: int) -> bool:
        every = self.pipeline_config.eval_steps
        return every > 0 and global_step % every == 0 and bool(self.pipeline_config.val_env_manager.env_configs)

    def _batch(self, train: RolloutScheduler, global_step: int, metrics: dict[str, Any]) -> DataProto | None:
        batch, metrics["time/step_rollout"] = _timed(train, global_step, self.pipeline_config.rollout_batch_size)
        if batch is None:
            return None
        metrics |= reduce_metrics(batch.meta_info["metrics"]) | train_metrics(batch)
        metrics["system/samples"] = (global_step + 1) * len(batch)
        dump_rollout_trajectories(self.pipeline_config.rollout_dump_dir, global_step, batch)
        return batch

    def _validated(self, val: RolloutScheduler, global_step: int) -> dict[str, Any]:
        reset_datasets("val")  # each validation plays the same tasks, from the first task of its data
        batch, seconds = _timed(val, global_step, self.pipeline_config.val_batch_size)
        if batch is None:
            logger.warning("step %d: the validation has no episodes, because its data have ended", global_step)
            return {"time/step_val": seconds}
        folder = self.pipeline_config.rollout_dump_dir
        dump_rollout_trajectories(folder and Path(folder, "val"), global_step, batch)
        return {**val_metrics(batch), "time/step_val": seconds}


def _timed(scheduler: RolloutScheduler, global_step: int, batch_size: int) -> tuple[DataProto | None, float]:
    began = time.monotonic()
    batch = scheduler.get_batch(DataProto(meta_info={"global_step": global_step}), batch_size)
    return batch, time.monotonic() - began
