"""Stored sessions with a different score than in 0.1.0, because they have successive answers to one prompt.

In 0.1.0, any two rewarded answers to one prompt were alternatives, and the score was the mean of the rewarded paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from proxy.store.inspection import BROKEN, Broken, Inspection, Stored
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.routes import trained_turns
from proxy.trajectory.scored_session import scored_session


@dataclass(frozen=True, slots=True)
class Rescored:
    """A session and its scores: in 0.1.0, and in exports now."""

    session_id: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"session {self.session_id}: {self.before:g} -> {self.now:g}"


def rescored(inspection: Inspection) -> Iterator[Rescored]:
    """Yield the sessions with a changed score, in order of creation. Sessions with a damaged row are skipped."""
    for stored in inspection.sessions():
        with suppress(*BROKEN):  # of values of a wrong type
            yield from _rescored(stored)


def _rescored(stored: Stored) -> Iterator[Rescored]:
    nodes = [node for node in stored.interactions if not isinstance(node, Broken)]
    if isinstance(stored.record, Broken) or len(nodes) < len(stored.interactions):
        return
    scores = scored_session(stored.record, trained_turns(nodes), LayoutOptions()).scores
    if scores.answers.successive is None or scores.answers.are_alternatives or scores.score is None:
        return
    before = fmean(score for score in scores.paths.values() if score is not None)
    if before != scores.score:
        yield Rescored(stored.session_id, before, scores.score)
