"""Starts tracing if OpenTelemetry's environment variables turn it on. Otherwise, OpenTelemetry is not imported.

OTEL_TRACES_EXPORTER or an endpoint (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) turns traces on.
OTEL_TRACES_EXPORTER=none or OTEL_SDK_DISABLED=true turns them off.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from tokengrove.spans import Tracing

_EXPORTER, _DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_INSTALLED = {"grpc": "otlp_proto_grpc"}
"""Exporters that other OpenTelemetry packages register, by protocol."""

logger = logging.getLogger(__name__)


def tracing_asked_for(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that turns traces on, or None if they are off. An empty variable counts as unset."""
    if environment.get(_DISABLED, "").strip().lower() == "true" or environment.get(_EXPORTER, "").strip() == "none":
        return None
    return next((name for name in (_EXPORTER, *_ENDPOINTS) if environment.get(name, "").strip()), None)


def start_tracing(
    environment: Mapping[str, str] = os.environ, *, tell: bool = True, shutdown_on_exit: bool = False
) -> Tracing | None:
    """Start tracing. Returns None if traces are off, or not possible; the latter is logged.

    It starts a thread, so call it after a fork. `tell`: False if another worker logs the outcome. `shutdown_on_exit`:
    export the last spans at the end of the program, without a call of `close`.
    """
    asked = tracing_asked_for(environment)
    if asked is None:
        return None
    try:
        tracing = _start(environment, shutdown_on_exit)
    except ImportError as error:
        problem = f"the package {error.name or error} is missing: pip install 'tokengrove[otel]'"
    except (ValueError, LookupError) as error:
        problem = str(error)
    else:
        if tell:
            logger.info("traces are on: %s is set", asked)
        return tracing
    if tell:
        logger.warning("%s is set, but there are no traces: %s", asked, problem)
    return None


@cache
def _own_tracing() -> Tracing | None:
    """The tracing of a program that is not a server, started once."""
    return start_tracing(shutdown_on_exit=True)


def tracer() -> Tracer | None:
    """The tracer of code outside the server; None without tracing.

    It is a tracer of the program's own OpenTelemetry provider, if one is set, else one configured by the environment
    variables.
    """
    api = sys.modules.get("opentelemetry.trace")  # a program that has set a provider has imported it
    if api is not None and not isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
        made: Tracer = provider.get_tracer("tokengrove")
        return made
    own = _own_tracing()
    return None if own is None else own.tracer


@contextmanager
def span(name: str, attributes: Mapping[str, Any]) -> Iterator[Span | None]:
    """A span around the block; None if traces are off. `attributes` that are None are omitted."""
    made = tracer()
    if made is None:
        yield None
        return
    from tokengrove.spans import span_around

    with span_around(made, name, {key: value for key, value in attributes.items() if value is not None}) as begun:
        yield begun


def traceparent() -> str | None:
    """The current span as a W3C `traceparent` header, for a server that continues its trace; None without a span."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not (context := api.get_current_span().get_span_context()).is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _start(environment: Mapping[str, str], shutdown_on_exit: bool) -> Tracing:
    """Start tracing. Raises ImportError, LookupError for an unknown exporter, ValueError for a wrong SDK variable."""
    from tokengrove.spans import Tracing

    name = environment.get(_EXPORTER, "").strip() or "otlp"
    return Tracing(_exporter(name, environment), shutdown_on_exit=shutdown_on_exit)


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    protocol = next((environment[key].strip() for key in _PROTOCOLS if environment.get(key, "").strip()), _HTTP)
    if name == "otlp" and protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    wanted = _INSTALLED.get(protocol, protocol) if name == "otlp" else name
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=wanted)), None)
    if found is None:
        known = f"otlp (with protocol {_HTTP}), console or none"
        raise LookupError(f"no package has the exporter {wanted!r}; without further packages {_EXPORTER} is {known}")
    return found.load()()
