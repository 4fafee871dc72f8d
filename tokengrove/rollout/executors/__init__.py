"""Where episodes run: in this process, in other processes of this machine, or on a Ray cluster."""

from tokengrove.rollout.executors.create import executor_for
from tokengrove.rollout.executors.executor import Executor
from tokengrove.rollout.executors.options import ExecutorKind, ExecutorOptions, RayOptions
from tokengrove.rollout.executors.results import end_lost_session

__all__ = ["Executor", "ExecutorKind", "ExecutorOptions", "RayOptions", "end_lost_session", "executor_for"]
