"""The result of a job, with the attributes of Rock's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass
class Span:
    """A part of a job, from its start to its end."""

    started_at: datetime | None = None
    finished_at: datetime | None = None


@dataclass
class VerifierResult:
    """`rewards["reward"]` is the score."""

    rewards: dict[str, float] = field(default_factory=dict)


@dataclass
class TrialResult(Span):
    """A run of an agent: the times of its parts, its error, its reward, and the end of its output."""

    environment_setup: Span = field(default_factory=Span)
    agent_setup: Span = field(default_factory=Span)
    agent_execution: Span = field(default_factory=Span)
    verifier: Span = field(default_factory=Span)
    exception_info: str | None = None
    verifier_result: VerifierResult | None = None
    agent_output: str = ""
    verifier_output: str = ""


@dataclass
class JobResult:
    """`status`: Finished, Failed or Timeout; `exit_code`: the agent's."""

    status: str
    exit_code: int
    trial_results: list[TrialResult]
