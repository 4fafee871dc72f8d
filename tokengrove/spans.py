"""The spans of one process, with the OpenTelemetry SDK.

The export runs in a thread of the SDK and can neither block nor fail the program: if a collector is too slow, the
oldest spans are dropped. This module imports OpenTelemetry, so only `tracing` imports it, and only if tracing is on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

FLUSH_S = 0.5
"""Seconds that the server waits at its end for the collector to accept the last spans."""

_ERRORS_EVERY_S = 60.0

logger = logging.getLogger(__name__)

Attributes = Mapping[str, Any]
"""Attributes of a span: strings, numbers, booleans, and sequences of one of these."""


class Ids(RandomIdGenerator):
    """Random ids. `promised`: the id of the next span, which an engine server has already received."""

    promised: int | None = None

    def generate_span_id(self) -> int:
        promised, self.promised = self.promised, None
        return super().generate_span_id() if promised is None else promised


class Tracing:
    """Creates the spans of one process and passes them to `exporter`. Create it after a fork.

    `tracer` creates the spans, with `ids`; `propagator` reads the trace context of requests.
    """

    def __init__(self, exporter: SpanExporter, *, shutdown_on_exit: bool = False) -> None:
        """The SDK reads its sampler, limits, resource and queue settings from the environment.

        `shutdown_on_exit`: export the remaining spans at the end of the program, without a call of `close`.
        """
        self._exporter = exporter
        self.ids = Ids()
        self._errors = _LimitedErrors()
        self._errors.install()
        self._provider = TracerProvider(resource=_resource(), id_generator=self.ids, shutdown_on_exit=shutdown_on_exit)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("tokengrove")
        self.propagator = TraceContextTextMapPropagator()

    async def close(self) -> None:
        """Export the remaining spans, for at most `FLUSH_S` seconds. Spans that are not exported by then are lost."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            self._errors.remove()
            with suppress(RuntimeError):  # the loop has not waited and is closed
                loop.call_soon_threadsafe(closed.set)

        # Not a thread of an executor: the interpreter would wait for it at exit.
        threading.Thread(target=close, name="tokengrove-traces", daemon=True).start()
        try:
            await asyncio.wait_for(closed.wait(), FLUSH_S)
        except TimeoutError:
            logger.warning("the last traces were not exported: the collector did not take them within %g s", FLUSH_S)
            self._errors.muted = True  # this line replaces later messages of the thread
            self._exporter.shutdown()  # ends its wait for a retry


@contextmanager
def span_around(tracer: Tracer, name: str, attributes: Attributes) -> Iterator[Span]:
    """A span around a block of this process, as a child of the current span; ERROR if the block raises.

    The span has the type or code of the error, without its text.
    """
    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, str(getattr(error, "code", None) or type(error).__name__))
            raise


def fail(span: Span, code: str) -> None:
    """End a span as failed."""
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _resource() -> Resource:
    """The resource of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME. The default service name is `tokengrove`."""
    found = Resource.create()
    named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if named else found.merge(Resource({SERVICE_NAME: "tokengrove"}))


class _LimitedErrors(logging.Handler):
    """Logs OpenTelemetry's messages, at most one a minute: an unavailable collector would otherwise fill the log.

    `muted`: logs nothing.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next, self._left_out = 0.0, 0
        self.muted = False

    def install(self) -> None:
        """Handle all of OpenTelemetry's messages, in place of other handlers."""
        source = logging.getLogger("opentelemetry")
        source.addHandler(self)
        source.propagate = False

    def remove(self) -> None:
        """Return the messages to other handlers."""
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
