"""The state of a server in `tokengrove watch`: its latest figures, their history, and recently changed sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Statistics = Mapping[str, Any]
"""An answer of `GET /rl/statistics`, or the data of an event `statistics`."""

_POINTS = 720
"""Points of history to keep: one hour."""
_KEPT = 200
"""Sessions to keep, the most recently changed."""


@dataclass(slots=True)
class Watched:
    """The state of a server. `url`: its address. `trouble`: why no events arrive at present.

    `sessions`: entries of the listing with their summaries, by id, the most recently changed last. `history`: the
    values of each figure, oldest first.
    """

    url: str
    statistics: Statistics | None = None
    trouble: str | None = None
    sessions: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    history: dict[str, list[float | None]] = field(default_factory=dict)
    _at: float = 0.0

    def learn(self, statistics: Statistics) -> None:
        """Apply new figures, and the new points of their history."""
        self.statistics, self.trouble = statistics, None
        points = statistics["history"]
        new = [index for index, at in enumerate(points["at"]) if at > self._at]
        for name, values in points.items():
            if isinstance(values, Sequence) and name != "at":
                kept = self.history.setdefault(name, [])
                kept.extend(values[index] for index in new)
                del kept[:-_POINTS]
        if new:
            self._at = points["at"][-1]

    def changed(self, entries: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> None:
        """Apply changed sessions. A session in `ids` that is not in `entries` no longer exists."""
        for name in ids:
            self.sessions.pop(name, None)
        for entry in sorted(entries, key=lambda entry: float(entry["summary"]["last_at"])):
            self.sessions.pop(entry["session_id"], None)
            self.sessions[entry["session_id"]] = entry
        for name in list(self.sessions)[:-_KEPT]:
            del self.sessions[name]

    def latest(self) -> list[Mapping[str, Any]]:
        """The sessions, the most recently changed first."""
        return list(reversed(self.sessions.values()))


def forks(statistics: Statistics) -> dict[str, int]:
    """The number of complete turns that forked, by reason; reasons without turns are omitted."""
    plain = ("first", "continued", "new_root")
    return {name: count for name, count in statistics["reasons"].items() if count and name not in plain}
