"""One episode: an agent plays one task in one session, which ends with a reward or with the reason of its failure."""

from tokengrove.rollout.episodes.agent import Agent
from tokengrove.rollout.episodes.checks import check_functions
from tokengrove.rollout.episodes.ended import EpisodeEnded, RewardFailed
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.episodes.giving_up import give_up
from tokengrove.rollout.episodes.plan import AgentSpec, EpisodePlan, Server
from tokengrove.rollout.episodes.play import play
from tokengrove.rollout.episodes.resolve import is_path, resolve_agent
from tokengrove.rollout.episodes.result import EpisodeResult, FailureKind
from tokengrove.rollout.episodes.task import Task

__all__ = [
    "Agent",
    "AgentSpec",
    "Episode",
    "EpisodeEnded",
    "EpisodePlan",
    "EpisodeResult",
    "FailureKind",
    "RewardFailed",
    "Server",
    "Task",
    "check_functions",
    "give_up",
    "is_path",
    "play",
    "resolve_agent",
]
