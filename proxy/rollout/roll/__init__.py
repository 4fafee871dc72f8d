"""Agents, environments and managers as ROLL runs them, under the names that its users know."""

from proxy.rollout.roll.values import DataProto, EpisodeResult, Section

__all__ = ["DataProto", "EpisodeResult", "Section"]
