"""The results of scorers for one session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ScorerFailure:
    """A call of a scorer that failed. `interaction_id`: the turn; None for a scorer of trajectories."""

    scorer: str
    interaction_id: str | None
    message: str

    def __str__(self) -> str:
        of = "" if self.interaction_id is None else f" of {self.interaction_id}"
        return f"scorer {self.scorer}{of}: {self.message}"


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a session.

    `scores`: by the scorer's name; the mean if a scorer scored several turns. `failures`: the calls that failed. The
    scores of all other calls are recorded. `without`: the calls that returned no score, by the scorer's name and the
    interaction id (None: of a trajectory).
    """

    session_id: str
    scores: Mapping[str, float] = field(default_factory=dict)
    failures: Sequence[ScorerFailure] = ()
    without: Sequence[tuple[str, str | None]] = ()
