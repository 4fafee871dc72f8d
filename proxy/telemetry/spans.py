"""The spans of a request, created after its end from the timelines of its turns.

The cost of spans arises only after a turn has ended and its reply is written. This module imports OpenTelemetry, so
only traced requests import it.

Names follow the semantic conventions of OpenTelemetry for HTTP servers and for generative AI, 1.41.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opentelemetry.trace import Span, SpanContext, SpanKind, TraceFlags, set_span_in_context

from proxy.telemetry.timeline import Event, Phase, Timeline
from proxy.telemetry.trace_context import TraceContext
from tokengrove.spans import Attributes, Tracing, fail

_CARRIED = (b"traceparent", b"tracestate")
_GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of a traced request, with the arguments of `Trace.add_turn`."""

    id: str
    timeline: Timeline
    ended: asyncio.Future[Any]
    describe: Callable[[], Mapping[str, Attributes]]


def begin_trace(
    tracing: Tracing, name: str, headers: Iterable[tuple[bytes, bytes]], started: float, attributes: Attributes
) -> Trace:
    """Begin the trace of a request, or continue its client's trace. `started`: seconds of the monotonic clock."""
    carried: dict[str, str] = {}
    for key, value in headers:
        if key in _CARRIED:
            field, text = key.decode(), value.decode("latin-1")
            carried[field] = f"{carried[field]},{text}" if field in carried else text
    context = tracing.propagator.extract(carried)
    offset = time.time_ns() - int(time.monotonic() * 1e9)
    span = tracing.tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=offset + int(started * 1e9))
    return Trace(tracing, span, offset)


class Trace:
    """The trace of one request: one span for the request, and one for each phase of its turns.

    `context`: the span of the request. `timeline`: the timeline of the request, once it is parsed. `begun`: new or
    earlier turns answer the request. `describe` returns further attributes of its span, once these turns have ended.
    """

    __slots__ = (
        *("_end", "_error", "_labels", "_offset", "_span", "_tracing", "_turns"),
        *("begun", "context", "describe", "timeline"),
    )

    def __init__(self, tracing: Tracing, span: Span, offset: int) -> None:
        """`offset`: nanoseconds from the monotonic clock to Unix time, the same for all spans of the request."""
        self._tracing, self._span, self._offset = tracing, span, offset
        self._end = 0.0
        self._error: str | None = None
        self._labels: Attributes = {}
        own = span.get_span_context()
        self.context = TraceContext(own.trace_id, own.span_id, own.trace_flags, own.trace_state.to_header())
        self._turns: list[_Turn] = []
        self.timeline: Timeline | None = None
        self.begun = False
        self.describe: Callable[[], Attributes] | None = None

    def add_turn(
        self,
        turn_id: str,
        timeline: Timeline,
        ended: asyncio.Future[Any],
        describe: Callable[[], Mapping[str, Attributes]],
    ) -> None:
        """Add a turn that the request has begun. `describe` returns the attributes of its spans by phase.

        It is called once the turn has `ended`.
        """
        self._turns.append(_Turn(turn_id, timeline, ended, describe))

    def link(self, other: TraceContext) -> None:
        """Link the span to the span of another request."""
        self._span.add_link(SpanContext(other.trace_id, other.span_id, False, TraceFlags(other.flags)))

    def end(self, error: str | None, attributes: Attributes, labels: Attributes = MappingProxyType({})) -> None:
        """End the request, with the code of its error if it failed. Each span has the `labels`.

        The spans are created once all turns have ended: after a client disconnects, its turns continue for a while.
        """
        self._end, self._error, self._labels = time.monotonic(), error, labels
        self._span.set_attributes({**attributes, **labels})
        if self.timeline is not None and not self.begun:
            self.timeline.ended = self._end  # it was rejected in the middle of a phase
        self._write_if_over()

    def _write_if_over(self, _: object = None) -> None:
        for turn in self._turns:
            if not turn.ended.done():
                turn.ended.add_done_callback(self._write_if_over)
                return
        self._write()

    def _write(self) -> None:
        if not self._span.is_recording():
            return
        written: set[Phase] = set()
        for turn in self._turns:
            code = _code_of(turn.ended)
            self._error = self._error or code
            self._write_phases(turn.timeline, code and self._error, written, turn.describe(), turn.id)
            last = turn.timeline.ended
            self._end = self._end if last is None else max(self._end, last)
        if not self._turns and self.timeline is not None:
            self._write_phases(self.timeline, self._error, written, {}, "")
        if self.describe is not None:
            self._span.set_attributes(self.describe())
        if self._error is not None:
            fail(self._span, self._error)
        self._span.end(self._ns(self._end))

    def _write_phases(
        self,
        timeline: Timeline,
        error: str | None,
        written: set[Phase],
        described: Mapping[str, Attributes],
        turn_id: str,
    ) -> None:
        """Write the spans of the phases that are not `written` yet. The choices of a reply share some phases.

        With an `error`, the last phase has failed. An event belongs to the phase in which it happened.
        """
        parent = set_span_in_context(self._span)
        events = list(timeline.events)
        if timeline.first_token is not None:
            events.append(Event(timeline.first_token, "first_token", {}))
        phases = timeline.phases()
        for phase in phases:
            inside = [event for event in events if phase.start <= event.at <= phase.end]
            events = [event for event in events if event not in inside]
            if phase in written:
                continue
            written.add(phase)
            if phase.name == _GENERATE:
                self._tracing.ids.promised = self.context.promised.get(turn_id)
            attributes, start = {**described.get(phase.name, {}), **self._labels}, self._ns(phase.start)
            span = self._tracing.tracer.start_span(phase.name, parent, attributes=attributes, start_time=start)
            self._add_events(span, inside)
            if error is not None and phase is phases[-1]:
                fail(span, error)
            span.end(self._ns(phase.end))
        self._add_events(self._span, events)

    def _add_events(self, span: Span, events: Iterable[Event]) -> None:
        for event in events:
            span.add_event(event.name, event.attributes, self._ns(event.at))

    def _ns(self, moment: float) -> int:
        return self._offset + int(moment * 1e9)


def _code_of(ended: asyncio.Future[Any]) -> str | None:
    """The code of the error that ended a turn, or None if it succeeded."""
    error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    return None if error is None else str(getattr(error, "code", type(error).__name__))
