"""Agents and training loops of AReaL, with AReaL's names.

`OpenAIProxyClient` is one session; its results are `InteractionWithTokenLogpReward`s by interaction id.
"""

from proxy.rollout.areal.client import OpenAIProxyClient
from proxy.rollout.areal.convert import to_areal
from proxy.rollout.areal.grouped import GroupedRolloutWorkflow
from proxy.rollout.areal.interaction import ApiType, InteractionWithTokenLogpReward
from proxy.rollout.areal.model_response import ModelResponse
from proxy.rollout.areal.resolution import resolve_workflow
from proxy.rollout.areal.rollout_workflow import RolloutWorkflow
from proxy.rollout.areal.tensor_rows import concat_padded_tensors
from proxy.rollout.areal.workflow import OpenAIProxyWorkflow

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
