"""ROLL's environments as the agent of a run: their episodes as tasks, and the agent that plays them."""

from tokengrove.roll.episodes.environment_agent import EnvironmentAgent
from tokengrove.roll.episodes.tasks import tasks_of

__all__ = ["EnvironmentAgent", "tasks_of"]
