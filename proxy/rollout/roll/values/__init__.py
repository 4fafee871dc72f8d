"""What runners, managers and the scheduler hand each other."""

from proxy.rollout.roll.values.data_proto import DataProto
from proxy.rollout.roll.values.episode_result import EpisodeResult
from proxy.rollout.roll.values.history_metrics import aggregate_metrics
from proxy.rollout.roll.values.object_hash import compute_object_hash
from proxy.rollout.roll.values.padding import pad_to_length
from proxy.rollout.roll.values.section import Section, as_section
from proxy.rollout.roll.values.step_limit import env_step_limit
from proxy.rollout.roll.values.stop_reasons import EpisodeStopReason, GenerateStopReason
from proxy.rollout.roll.values.templates import contains_renderable_field, rendered

__all__ = [
    "DataProto",
    "EpisodeResult",
    "EpisodeStopReason",
    "GenerateStopReason",
    "Section",
    "aggregate_metrics",
    "as_section",
    "compute_object_hash",
    "contains_renderable_field",
    "env_step_limit",
    "pad_to_length",
    "rendered",
]
