"""Rollouts of ROLL: groups of environments play, and trainers take batches of whole groups from a queue."""

from tokengrove.roll.scheduler.agentic_rollout_pipeline import AgenticRolloutPipeline, RolloutStep
from tokengrove.roll.scheduler.batch_metrics import append_to_dict, get_episode_scores, reduce_metrics
from tokengrove.roll.scheduler.env_activity_monitor import EnvActivityMonitor
from tokengrove.roll.scheduler.environment_worker import EnvironmentWorker
from tokengrove.roll.scheduler.group_filter import GroupFilter
from tokengrove.roll.scheduler.group_queue import GroupData, GroupQueue
from tokengrove.roll.scheduler.group_queue_manager import GroupQueueManager
from tokengrove.roll.scheduler.rollout_scheduler import RolloutScheduler
from tokengrove.roll.scheduler.trajectory_dump import dump_rollout_trajectories

__all__ = [
    "AgenticRolloutPipeline",
    "EnvActivityMonitor",
    "EnvironmentWorker",
    "GroupData",
    "GroupFilter",
    "GroupQueue",
    "GroupQueueManager",
    "RolloutScheduler",
    "RolloutStep",
    "append_to_dict",
    "dump_rollout_trajectories",
    "get_episode_scores",
    "reduce_metrics",
]
