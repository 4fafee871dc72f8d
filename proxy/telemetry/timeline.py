"""The moments of a turn. Its log line, its metrics and its spans are made of them after its end.

A moment is noted by storing `time.monotonic()` in its attribute, so a turn pays no call of a Python function for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from proxy.telemetry.trace_context import TraceContext


class Event(NamedTuple):
    """Something that happened to a turn at a moment `at`, such as a submission to another engine server."""

    at: float
    name: str
    attributes: Mapping[str, str | int]


class Phase(NamedTuple):
    """A part of a turn from `start` to `end`."""

    name: str
    start: float
    end: float


@dataclass(slots=True, eq=False)
class Timeline:
    """When a turn reached what. Seconds of `time.monotonic()`; None: not reached, or not passed by this turn.

    received      the head of its request has come
    read          its body has been read
    begun         the body is parsed and the session found: the turn begins
    held          it waits before its prompt is made, because the engine is paused or no engine server is alive
    let_in        that wait is over
    matched       its parent in the tree is found
    rendered      its prompt is made
    admitted      it has passed the gate, and is submitted to the engine
    first_token   the engine has given the first token
    sampled       the output has ended
    commit_begun  the commit begins
    committed     the commit is durable, and readers see the end
    failed        it failed or was cancelled, and that is now recorded
    ended         all is over, also the recording of a failure

    `events`: what happened besides, in order. `trace`: where its request is in a trace, if traces are made. The choices
    of one reply share the moments until `rendered`.
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
        """Add an event of now."""
        self.events += (Event(time.monotonic(), name, attributes),)

    def phases(self) -> list[Phase]:
        """What the turn has spent its time with, in order; the last phase of a failed turn ends with the failure.

        queue: the wait for the gate, before the prompt is made or after; match: the search for the parent; render: the
        making of the prompt; generate: the engine; commit: the database. A phase that was not begun, or that has not
        ended, is left out.
        """
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
                found.append(Phase(name, start, last))
        return found
