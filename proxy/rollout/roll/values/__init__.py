"""What runners, managers and the scheduler hand each other."""

from proxy.rollout.roll.values.data_proto import DataProto
from proxy.rollout.roll.values.episode_result import EpisodeResult
from proxy.rollout.roll.values.section import Section, as_section
from proxy.rollout.roll.values.step_limit import env_step_limit

__all__ = ["DataProto", "EpisodeResult", "Section", "as_section", "env_step_limit"]
