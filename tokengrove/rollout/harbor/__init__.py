"""Tasks in Harbor's format: an instruction, an environment, tests that give the reward, and a solution.

Only the format is used: Harbor itself need not be installed.
"""

from tokengrove.rollout.harbor.data import is_harbor, tasks
from tokengrove.rollout.harbor.harbor_agent import HarborAgent, agent_spec
from tokengrove.rollout.harbor.options import HarborOptions
from tokengrove.rollout.harbor.oracle import Tried, try_tasks
from tokengrove.rollout.harbor.task_folder import BadTask, Stage, TaskFolder

__all__ = [
    "BadTask",
    "HarborAgent",
    "HarborOptions",
    "Stage",
    "TaskFolder",
    "Tried",
    "agent_spec",
    "is_harbor",
    "tasks",
    "try_tasks",
]
