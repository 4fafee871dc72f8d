"""OpenTelemetry's side of tracing: the spans of a request, made after its end from the timelines of its turns.

The server pays for a span when a turn is over and its reply is written. Export runs in a thread of the SDK and can
neither hold up nor fail a request: of what a collector does not take in time, the oldest spans are dropped. This module
imports OpenTelemetry, so only `tracing` imports it, and only if tracing is asked for.

Names follow the semantic conventions of OpenTelemetry for HTTP servers and for generative AI, 1.41.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.telemetry.timeline import Event, Phase, Timeline
from proxy.telemetry.trace_context import TraceContext

FLUSH_S = 0.5
"""How long the end of the server waits for the collector to take the last spans."""

_ERRORS_EVERY_S = 60.0
_CARRIED = (b"traceparent", b"tracestate")
_GENERATE = "generate"

logger = logging.getLogger(__name__)

Attributes = Mapping[str, Any]
"""Attributes of a span: strings, numbers, booleans, and sequences of one of these."""


class Ids(RandomIdGenerator):
    """Random ids. `promised`: the id of the next span, which an engine server has been told already."""

    promised: int | None = None

    def generate_span_id(self) -> int:
        promised, self.promised = self.promised, None
        return super().generate_span_id() if promised is None else promised


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of a traced request, as `Trace.add_turn` gets it."""

    id: str
    timeline: Timeline
    ended: asyncio.Future[Any]
    describe: Callable[[], Mapping[str, Attributes]]


class Tracing:
    """Makes the traces of one server process, and hands them to `exporter`. Make it after the process was forked."""

    def __init__(self, exporter: SpanExporter, *, shutdown_on_exit: bool = False) -> None:
        """The SDK reads its sampler, its limits, its resource and its queue from the environment.

        `shutdown_on_exit`: nobody calls `close`, and the end of the program exports what is left.
        """
        self._exporter = exporter
        self.ids = Ids()
        self._errors = _LimitedErrors()
        self._errors.install()
        self._provider = TracerProvider(resource=_resource(), id_generator=self.ids, shutdown_on_exit=shutdown_on_exit)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("tokengrove")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Iterable[tuple[bytes, bytes]], started: float, attributes: Attributes) -> Trace:
        """Begin the trace of a request, or continue that of its client. `started`: of the monotonic clock, in s."""
        carried: dict[str, str] = {}
        for key, value in headers:
            if key in _CARRIED:
                field, text = key.decode(), value.decode("latin-1")
                carried[field] = f"{carried[field]},{text}" if field in carried else text
        context = self._propagator.extract(carried)
        offset = time.time_ns() - int(time.monotonic() * 1e9)
        span = self.tracer.start_span(
            name, context, SpanKind.SERVER, attributes, start_time=offset + int(started * 1e9)
        )
        return Trace(self, span, offset)

    async def close(self) -> None:
        """Export what is left, for at most `FLUSH_S` seconds; what is not exported by then is lost."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            self._errors.remove()
            with suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(closed.set)

        # Not a thread of an executor: the interpreter would wait for it at its end.
        threading.Thread(target=close, name="tokengrove-traces", daemon=True).start()
        try:
            await asyncio.wait_for(closed.wait(), FLUSH_S)
        except TimeoutError:
            logger.warning("the last traces were not exported: the collector did not take them within %g s", FLUSH_S)
            self._errors.muted = True  # what the thread says from now on, this line has said
            self._exporter.shutdown()  # ends its wait for another attempt


class Trace:
    """The trace of one request: one span for the request, and one for each phase of its turns.

    `context`: the span of the request. `timeline`: that of the request, once it is parsed. `begun`: it is answered by
    turns, new or earlier ones. `describe` returns further attributes of its span, once these have ended.
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
        """Add a turn that the request has begun. `describe` returns the attributes of its spans by phase, once it has
        `ended`."""
        self._turns.append(_Turn(turn_id, timeline, ended, describe))

    def link(self, other: TraceContext) -> None:
        """Refer to another request."""
        self._span.add_link(SpanContext(other.trace_id, other.span_id, False, TraceFlags(other.flags)))

    def end(self, error: str | None, attributes: Attributes, labels: Attributes = MappingProxyType({})) -> None:
        """End the request, with the code of its error if it failed. Its spans are made once its turns have ended, too:
        those of a client that left go on for a while. Each of them has the `labels`.
        """
        self._end, self._error, self._labels = time.monotonic(), error, labels
        self._span.set_attributes({**attributes, **labels})
        if self.timeline is not None and not self.begun:
            self.timeline.ended = self._end  # it was refused in the middle of a phase
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
            _fail(self._span, self._error)
        self._span.end(self._ns(self._end))

    def _write_phases(
        self,
        timeline: Timeline,
        error: str | None,
        written: set[Phase],
        described: Mapping[str, Attributes],
        turn_id: str,
    ) -> None:
        """Write the spans of the phases that are not `written` yet: the choices of a reply share some.

        The last of them failed if there is an `error`. An event belongs to the phase in which it happened.
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
                _fail(span, error)
            span.end(self._ns(phase.end))
        self._add_events(self._span, events)

    def _add_events(self, span: Span, events: Iterable[Event]) -> None:
        for event in events:
            span.add_event(event.name, event.attributes, self._ns(event.at))

    def _ns(self, moment: float) -> int:
        return self._offset + int(moment * 1e9)


@contextmanager
def span_around(tracer: Tracer, name: str, attributes: Attributes) -> Iterator[Span]:
    """A span around a block of this process, below the one that is current; ERROR if the block raises.

    What it raises is named by its type or code, without its text.
    """
    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            _fail(span, str(getattr(error, "code", None) or type(error).__name__))
            raise


def _code_of(ended: asyncio.Future[Any]) -> str | None:
    """The code of the error that ended a turn, None if it ended well."""
    error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    return None if error is None else str(getattr(error, "code", type(error).__name__))


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _resource() -> Resource:
    """What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say of the server, which is `tokengrove` without a name."""
    found = Resource.create()
    named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if named else found.merge(Resource({SERVICE_NAME: "tokengrove"}))


class _LimitedErrors(logging.Handler):
    """Passes on what OpenTelemetry logs, one line a minute: a collector that is away would fill the log.

    `muted`: passes nothing on.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next, self._left_out = 0.0, 0
        self.muted = False

    def install(self) -> None:
        """Take all lines of OpenTelemetry from other handlers."""
        source = logging.getLogger("opentelemetry")
        source.addHandler(self)
        source.propagate = False

    def remove(self) -> None:
        """Leave the lines to other handlers again."""
        source = logging.getLogger("opentelemetry")
        source.removeHandler(self)
        source.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if self.muted or now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} lines like this were left out)" if self._left_out else ""
        self._next, self._left_out = now + _ERRORS_EVERY_S, 0
        cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        logger.warning("traces: %s%s%s", record.getMessage(), cause, more)
