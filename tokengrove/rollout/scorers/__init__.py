"""Scorers: functions that score a turn or a whole trajectory. Their results are recorded as named rewards.

They run in the environment, with the control key, while an episode is played or after its session has ended.
"""

from tokengrove.rollout.scorers.live import score_live
from tokengrove.rollout.scorers.scored import Scored, ScorerFailure
from tokengrove.rollout.scorers.scorer import Scorer, load_scorer, trajectory_scorer, turn_scorer
from tokengrove.rollout.scorers.scoring import score_trajectory
from tokengrove.rollout.scorers.sessions import score_sessions
from tokengrove.rollout.trajectory import Trajectory, Turn

__all__ = [
    "Scored",
    "Scorer",
    "ScorerFailure",
    "Trajectory",
    "Turn",
    "load_scorer",
    "score_live",
    "score_sessions",
    "score_trajectory",
    "trajectory_scorer",
    "turn_scorer",
]
