"""The record of one HTTP request for its log line and its counts, created on arrival and ended exactly once."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from proxy.telemetry.log_lines import Value
from proxy.telemetry.session_labels import labels_of

if TYPE_CHECKING:
    from proxy.telemetry.spans import Trace
    from tokengrove.spans import Tracing

MetadataOf = Callable[[str], "Mapping[str, Any] | None"]
"""Returns the metadata of a session by its id, or by the part of a path that names it; None if it is not in memory."""

RequestEnd = Callable[["HttpRequest"], None]
"""A callback for each request that has ended, on the event loop."""

CLIENT_LEFT = 499
"""The status of a request if its client disconnected before the answer began, as in nginx."""

UNMATCHED = "unmatched"
"""The route of a request that matches no route, or that was rejected before routing."""

logger = logging.getLogger(__name__)

REQUEST = "tokengrove.request"
"""The key of the record of a request in its ASGI scope."""
ROUTE = "tokengrove.route"
"""The key of the template of a request's route in its ASGI scope."""
_ID = b"x-request-id"
_SANE = re.compile(rb"[\x21-\x7e]{1,200}")
_SECRET = re.compile(r"(?<![^/])~.*(?=/(?:v1|rl)/)|(?<![^/])~.*|~[^/]*", re.DOTALL)


class HttpRequest:
    """One request. Unknown values are None.

    `id`: its request id, as sent by the client (`client_id`) or as in the answer. `route`: the template of its path,
    which never has a session or a secret. `code` and `message`: the error that it was answered with. `session`: the id
    of its session; `metadata`: the metadata of the session, once it is found. `client`: the address that it came from.
    `left`: the client disconnected before the end of the answer. `elsewhere`: another worker answers and logs it.
    `started`: the start in seconds of the monotonic clock; `began`: in Unix seconds. `tell`: logs the end of the
    request instead of the line that every request has. `trace`: the trace of a turn's request, if tracing is on.
    """

    __slots__ = (
        *("method", "route", "id", "client_id", "status", "code", "message", "session", "client", "left", "elsewhere"),
        *("started", "began", "tell", "trace", "metadata", "_on_end", "_metadata_of", "_ended"),
    )

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        on_end: RequestEnd | None = None,
        metadata_of: MetadataOf | None = None,
    ) -> None:
        """Store the record in the `scope` of its request. `metadata_of`: finds metadata that no endpoint has noted."""
        scope[REQUEST] = self
        self.method: str = scope["method"]
        self.route = UNMATCHED
        self.client_id = self.id = _sent_id(scope["headers"])
        self.status: int | None = None
        self.code: str | None = None
        self.message: str | None = None
        self.session: str | None = None
        self.metadata: Mapping[str, Any] | None = None
        self.client: tuple[str, int] | None = scope.get("client")
        self.left = self.elsewhere = False
        self.started, self.began = time.monotonic(), time.time()
        self.tell: RequestEnd | None = None
        self.trace: Trace | None = None
        self._on_end, self._metadata_of, self._ended = on_end, metadata_of, False

    def begin_trace(self, tracing: Tracing, scope: MutableMapping[str, Any]) -> None:
        """Begin the trace of this request, which ends with it. On failure, the request continues without a trace."""
        route = scope.get(ROUTE, UNMATCHED)
        attributes = {
            "http.request.method": self.method,
            "http.route": route,
            "url.path": without_secret(scope["path"]),
            "url.scheme": scope["scheme"],
        }
        try:
            from proxy.telemetry.spans import begin_trace  # OpenTelemetry is imported only for tracing

            self.trace = begin_trace(tracing, f"{self.method} {route}", scope["headers"], self.started, attributes)
        except Exception:
            logger.exception("a trace could not be begun")

    def enter(self, session: str, metadata: Mapping[str, Any]) -> None:
        """Note the session of the request."""
        self.session, self.metadata = session, metadata

    @property
    def labels(self) -> dict[str, Value]:
        """The labels of its session's training run."""
        if self.metadata is None and self.session is not None and self._metadata_of is not None:
            self.metadata = self._metadata_of(self.session)
        return labels_of(self.metadata or {})

    @property
    def trace_id(self) -> str | None:
        """The id of its trace in 32 hex digits, or None."""
        return None if self.trace is None else self.trace.context.hex_id

    def name(self) -> str:
        """Return the request id. A new one is created if the client sent none."""
        if self.id is None:
            self.id = f"req_{uuid.uuid4().hex}"
        return self.id

    def fail(self, status: int, code: str, message: str) -> None:
        """Note the error that the request is answered with."""
        self.status = status
        self.break_off(code, message)

    def break_off(self, code: str, message: str) -> None:
        """Note an error that occurred after the answer had begun. The status that was sent is kept."""
        self.code, self.message = code, message

    def end(self, scope: MutableMapping[str, Any]) -> None:
        """Report the end of the request, once. A failure is only logged, since the reply has been sent."""
        if self._ended or self.elsewhere:
            return
        self._ended = True
        self.route = scope.get(ROUTE, UNMATCHED)
        if self.session is None:
            self.session = scope.get("path_params", {}).get("session")
        if self.session is not None and "~" in self.session:
            self.session = without_secret(self.session)
        if self.status is None:
            self.status, self.left = CLIENT_LEFT, True
        try:
            if self._on_end is not None:
                self._on_end(self)
            if self.trace is not None:
                self._end_trace(self.trace)
        except Exception:
            logger.exception("the end of a request could not be told")

    def _end_trace(self, trace: Trace) -> None:
        attributes = {"http.response.status_code": self.status, "tokengrove.request.id": self.name()}
        if self.session is not None:
            attributes["tokengrove.session.id"] = attributes["gen_ai.conversation.id"] = self.session
        labels = {f"tokengrove.{name}": value for name, value in self.labels.items()}
        trace.end(self.code or ("client_left" if self.left else None), attributes, labels)


def without_secret(path: str) -> str:
    """A path, or the part of a path that names a session, with its key or secret replaced by `~...`."""
    return _SECRET.sub("~...", path) if "~" in path else path


def found_in(scope: MutableMapping[str, Any]) -> HttpRequest | None:
    """The record of the request with this ASGI scope, if it has one."""
    return scope.get(REQUEST)


def request_of(scope: MutableMapping[str, Any]) -> HttpRequest:
    """The record of the request with this ASGI scope, or a new one that is not reported."""
    return scope.get(REQUEST) or HttpRequest(scope)


def set_route(scope: MutableMapping[str, Any], template: str) -> None:
    """Note which route takes a request."""
    scope[ROUTE] = template


def _sent_id(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The client's id of a request, if it has at most 200 visible ASCII characters, as headers and logs need."""
    for name, value in headers:
        if name == _ID:
            return value.decode("ascii") if _SANE.fullmatch(value) else None
    return None
