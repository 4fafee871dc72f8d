"""The values of a session by which listings select and sort. Each is a number, a text, a boolean, or None.

Values of turns come from the session's summary; the others are stored with the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.trajectory.summary import Summary
from proxy.types import ListedSession, SessionRecord

Value = float | str | bool | None

OF_TURNS: Mapping[str, Callable[[Summary], float | None]] = {
    "reward": lambda summary: summary.score,
    "turns": lambda summary: summary.turns,
    "forks": lambda summary: summary.forks,
    "lost": lambda summary: summary.failed + summary.aborted,
    "tokens": lambda summary: summary.prompt_tokens + summary.output_tokens,
    "prompt_tokens": lambda summary: summary.prompt_tokens,
    "output_tokens": lambda summary: summary.output_tokens,
}
"""Values of the turns of a session, by their names in orders and filters."""
DURATION = "duration"
KEYED = ("metadata", "metrics")
"""The objects of a session whose top-level keys are values: `metadata.step`."""
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class SortOrder:
    """The order of a value; sessions without it come last. Equal values are in order of creation.

    `name`: a name of OF_TURNS, `duration`, or `metadata` or `metrics` with the `key` that has the value.
    """

    name: str
    key: str | None = None
    descending: bool = False

    @property
    def reads_turns(self) -> bool:
        """Whether the value is one of turns, so that it needs summaries."""
        return self.name in OF_TURNS

    def value(self, session: ListedSession, summary: Summary | None) -> Value:
        """The value of a session. `summary`: needed if the order reads turns."""
        if summary is not None and self.name in OF_TURNS:
            return OF_TURNS[self.name](summary)
        if self.name == DURATION:
            return duration_s(session.record)
        values: Mapping[str, Any] = getattr(session.record, self.name)
        found = values.get(str(self.key))
        if isinstance(found, str):
            return found[:_LONGEST_TEXT]
        return found if isinstance(found, int | float) else None


def duration_s(record: SessionRecord) -> float:
    """Seconds from the start of a session to its end, or to its last change."""
    return (record.updated_at if record.ended_at is None else record.ended_at) - record.created_at
