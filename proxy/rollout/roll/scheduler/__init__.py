"""The run: groups of environments play, their results are queued, and trainers take batches of whole groups."""

from proxy.rollout.roll.scheduler.env_activity_monitor import EnvActivityMonitor
from proxy.rollout.roll.scheduler.group_filter import GroupFilter
from proxy.rollout.roll.scheduler.group_queue import GroupData, GroupQueue
from proxy.rollout.roll.scheduler.group_queue_manager import GroupQueueManager

__all__ = ["EnvActivityMonitor", "GroupData", "GroupFilter", "GroupQueue", "GroupQueueManager"]
