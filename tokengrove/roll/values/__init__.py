"""Values that runners, managers and the scheduler exchange."""

from tokengrove.roll.values.data_proto import DataProto
from tokengrove.roll.values.episode_result import EpisodeResult
from tokengrove.roll.values.history_metrics import aggregate_metrics
from tokengrove.roll.values.object_hash import compute_object_hash
from tokengrove.roll.values.padding import pad_to_length
from tokengrove.roll.values.section import Section, as_section
from tokengrove.roll.values.step_limit import env_step_limit
from tokengrove.roll.values.stop_reasons import EpisodeStopReason, GenerateStopReason
from tokengrove.roll.values.templates import contains_renderable_field, rendered

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
