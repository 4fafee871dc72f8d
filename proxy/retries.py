"""What becomes of a request that was made before: DESIGN's table, so that no retry is sampled or trained twice.

| the earlier attempt                      | marked  | unmarked     |
| in flight, its client is there           | attach  | a new sample |
| in flight, its client is gone            | attach  | attach       |
| failed or aborted before its commit      | anew, the old one superseded |
| committed, its end was never written out | replay  | replay       |
| committed and written                    | replay  | a new sample |

Marked: the client says that it is a retry, or its Idempotency-Key is the earlier attempt's. In-flight rules hold for
one server process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.sessions import Session
from proxy.turn import Turn
from proxy.types import Interaction, TurnRequest


@dataclass(frozen=True, slots=True)
class Attach:
    """Read the generation that runs already, one turn a choice."""

    choices: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Replay:
    """Give the committed interactions again, one a choice."""

    interactions: Sequence[Interaction]


@dataclass(frozen=True, slots=True)
class Anew:
    """Sample; `superseded` are the ids of failed attempts that this one replaces."""

    superseded: Sequence[str]


class Retries:
    """The requests that are in flight on this server, by session and request hash."""

    def __init__(self) -> None:
        self._in_flight: dict[tuple[str, str], list[Sequence[Turn]]] = {}

    def decide(self, session: Session, request: TurnRequest, key: str) -> Attach | Replay | Anew:
        """The rule for a request whose hash is `key`; the newest earlier attempt counts."""
        for choices in reversed(self._in_flight.get((session.id, key), [])):
            deserted = all(turn.readers == 0 for turn in choices)
            if deserted or _is_marked(request, choices[0].interaction):
                return Attach(choices)
        earlier = session.replies.get(key)
        if earlier is not None:
            written = earlier[0].id not in session.unwritten
            if not written or _is_marked(request, earlier[0]):
                return Replay(earlier)
        return Anew(session.failures.get(key, ()))

    def begin(self, session: Session, key: str, choices: Sequence[Turn]) -> None:
        """Note a generation that runs."""
        self._in_flight.setdefault((session.id, key), []).append(choices)

    def end(self, session: Session, key: str, choices: Sequence[Turn]) -> None:
        """Forget a generation once all its choices have ended."""
        running = self._in_flight[session.id, key]
        running.remove(choices)
        if not running:
            del self._in_flight[session.id, key]


def _is_marked(request: TurnRequest, earlier: Interaction) -> bool:
    if request.retry:
        return True
    return request.idempotency_key is not None and request.idempotency_key == earlier.notes.get("idempotency_key")
