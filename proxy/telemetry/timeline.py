"""The timeline of a turn, from which its log line, its metrics and its spans are created after its end.

A time is noted by storing `time.monotonic()` in an attribute, which avoids the cost of a Python call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

from proxy.telemetry.trace_context import TraceContext


class Event(NamedTuple):
    """An event of a turn at the time `at`, such as a submission to another engine server."""

    at: float
    name: str
    attributes: Mapping[str, str | int]


class Phase(NamedTuple):
    """A phase of a turn from `start` to `end`."""

    name: str
    start: float
    end: float


@dataclass(slots=True, eq=False)
class Timeline:
    """The times of a turn in seconds of `time.monotonic()`. None: not reached yet, or never reached by this turn.

    received      the head of its request has arrived
    read          its body has been read
    begun         the body is parsed and the session found; the turn begins
    held          it waits before its prompt is built, because the engine is paused or no engine server is alive
    let_in        this wait has ended
    matched       its parent in the tree is found
    rendered      its prompt is built
    admitted      it has passed the gate, and is submitted to the engine
    first_token   the engine has returned the first token
    sampled       the output has ended
    commit_begun  the commit begins
    committed     the commit is durable, and readers see the end
    failed        it failed or was cancelled, and the failure is about to be recorded
    ended         everything has ended, including the recording of a failure

    `events`: further events, in order. `trace`: the place of its request in a trace, if tracing is on. The choices of
    one reply share the times up to `rendered`.
    """

    received: float | None = None
    read: float | None = None
    begun: float | None = None
    held: float | None = None
    let_in: float | None = None
    matched: float | None = None
    rendered: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    sampled: float | None = None
    commit_begun: float | None = None
    committed: float | None = None
    failed: float | None = None
    ended: float | None = None
    events: tuple[Event, ...] = ()
    trace: TraceContext | None = None

    def note(self, name: str, **attributes: str | int) -> None:
        """Add an event at the current time."""
        self.events += (Event(time.monotonic(), name, attributes),)

    def phases(self) -> list[Phase]:
        """The phases of the turn, in order. The last phase of a failed turn ends with the failure.

        queue: the wait for the gate, before or after the prompt is built; match: the search for the parent; render:
        building the prompt; generate: the engine; commit: the database. A phase that has not begun or not ended is left
        out.
        """
        return list(starmap(Phase, self.parts()))

    def parts(self) -> list[tuple[str, float, float]]:
        """The same as plain tuples, which every turn makes for its metrics."""
        over = self.failed if self.failed is not None else self.ended
        parts = (
            ("queue", self.held, self.let_in),
            ("match", self.begun if self.held is None else self.let_in, self.matched),
            ("render", self.matched, self.rendered),
            ("queue", self.rendered, self.admitted if self.admitted is not None else self.sampled),
            ("generate", self.admitted, self.sampled),
            ("commit", self.commit_begun, self.committed),
        )
        found = []
        for name, start, end in parts:
            last = over if end is None else end
            if start is not None and last is not None:
                found.append((name, start, last))
        return found
