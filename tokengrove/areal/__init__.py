"""Agents and training loops of AReaL, with AReaL's names.

`OpenAIProxyClient` is one session. Its exports are `InteractionWithTokenLogpReward`s by interaction id.
"""

from tokengrove.areal.client import OpenAIProxyClient
from tokengrove.areal.convert import to_areal
from tokengrove.areal.grouped import GroupedRolloutWorkflow
from tokengrove.areal.interaction import ApiType, InteractionWithTokenLogpReward
from tokengrove.areal.model_response import ModelResponse
from tokengrove.areal.resolution import resolve_workflow
from tokengrove.areal.rollout_workflow import RolloutWorkflow
from tokengrove.areal.tensor_rows import concat_padded_tensors
from tokengrove.areal.workflow import OpenAIProxyWorkflow

__all__ = [
    "ApiType",
    "GroupedRolloutWorkflow",
    "InteractionWithTokenLogpReward",
    "ModelResponse",
    "OpenAIProxyClient",
    "OpenAIProxyWorkflow",
    "RolloutWorkflow",
    "concat_padded_tensors",
    "resolve_workflow",
    "to_areal",
]
