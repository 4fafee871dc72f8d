"""All connections of one server: the limit of their number, and the timeouts of clients.

A connection that is not being served is closed after a timeout or to make room. One sweep per second examines all
connections, so it costs a turn nothing. At the limit, connections that wait for their clients make room, first those of
the host with the most; if all are in use, further connections get a 503 immediately. `SPARE` connections beyond the
limit are for the endpoints that monitor the server.

Closed connections are summarised in one log line.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from proxy.api.http import error_response
from proxy.resources.senders import Senders
from proxy.serving import peer
from proxy.serving.connection import Connection, Stage
from proxy.telemetry.http_request import HttpRequest, RequestEnd
from proxy.telemetry.process_metrics import ProcessMetrics
from tokengrove.errors import SHUTTING_DOWN, EngineUnavailable, NotFound, ProxyError, RequestTimeout, TooManyConnections

logger = logging.getLogger(__name__)

SPARE = 16
"""The number of connections beyond the limit, which can only request `WATCHED`."""

WATCHED = frozenset({"/health", "/ready", "/metrics"})
LEAST_BODY_BYTES = 1024
SWEEP_S = 1.0
_LOG_EVERY_S = 10.0
_LARGEST_SHARE = 16
"""Up to one in this many connections is closed at a time to make room, so that a flood does not need a search each."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The timeouts of clients in seconds.

    `head_s`: for the head of a request. `body_s`: for `LEAST_BODY_BYTES` of a body. `unread_s`: to read any part of a
    reply. `idle_s`: between requests. `ending_s`: to read any part of a reply once the server is stopping.
    """

    head_s: float = 10.0
    body_s: float = 10.0
    unread_s: float = 120.0
    idle_s: float = 75.0
    ending_s: float = 5.0


class Connections(ServerState):
    """The connections of one server, of which uvicorn manages the set. `patience` None: no timeouts.

    `on_end`: called with the records of requests that are refused before they reach the application.
    """

    connections: set[Connection]  # type: ignore[assignment]

    def __init__(self, patience: Patience | None, on_end: RequestEnd | None = None) -> None:
        super().__init__()
        self.on_end = on_end
        self.most: int | None = None
        self.metrics_port: int | None = None
        self._patience = patience
        self._by_host = Senders().connections
        self._ending = self._all_used = False
        self._events: Counter[str] = Counter()
        self._failures: set[str] = set()
        self._log_at = 0.0

    def show(self, metrics: ProcessMetrics, senders: Senders) -> None:
        """Expose the numbers of connections by state, and their limit, to `metrics`, and count them by `senders`.

        Call it before the first connection.
        """
        self._by_host = senders.connections
        metrics.connections.watch(self._by_state)
        metrics.most_connections.watch(lambda: self.most or 0)

    def _by_state(self) -> dict[tuple[str, ...], int]:
        states = Counter(_STATES[connection.look()] for connection in self.connections)
        return {(state,): states[state] for state in _STATES.values()}

    def admit(self, connection: Connection) -> None:
        """Make room for a new connection. Without room, restrict the connection to `WATCHED`, or refuse it.

        A connection to `metrics_port` is always restricted to `WATCHED`.
        """
        self._by_host.add(connection.sender, 1)
        if self.metrics_port is not None and connection.local_port == self.metrics_port:
            other = NotFound(f"this port has only {', '.join(sorted(WATCHED))} (--metrics-port)")
            connection.app = _Limited(connection.app, other, self.on_end)
        if self._ending:
            connection.transport.close()
        elif self.most is not None and len(self.connections) > self.most and not self._make_room(connection):
            error = TooManyConnections("all connections are in use; try again", retry_after_s=1.0)
            if len(self.connections) <= self.most + SPARE:
                connection.app = _Limited(connection.app, error, self.on_end)
            else:
                self.note("refused, with all others in use")
                connection.refuse(error)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was lost."""
        self._by_host.add(connection.sender, -1)

    def note(self, what: str) -> None:
        """Count a connection that is closed, for the log."""
        self._events[what] += 1

    def note_failure(self, what: str) -> None:
        """The same as `note`, for the exception that is being handled. Only the first traceback is logged."""
        if what not in self._failures:
            self._failures.add(what)
            logger.exception("%s; further ones are counted only", what)
        self.note(what)

    async def watch(self) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.sweep(loop.time())
            except Exception:
                logger.exception("a sweep of the connections failed")

    def sweep(self, now: float) -> None:
        """Close the connections of clients that have exceeded a timeout at `now`."""
        self._all_used = False
        if self._patience is not None:
            for connection in list(self.connections):
                self._look(connection, now, self._patience)
        if self._events and now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            self.log()

    def log(self) -> None:
        """Log how many connections were closed since the last call, and why."""
        if self._events:
            reasons = ", ".join(f"{count} {what}" for what, count in self._events.most_common())
            left = sum(not connection.transport.is_closing() for connection in self.connections)
            logger.warning("connections closed: %s; %d are open", reasons, left)
            self._events.clear()

    def end(self, now: float) -> None:
        """Begin to stop: close connections that are not being served. An incomplete request gets a 503."""
        if self._patience is not None:
            self._ending = True
            self.sweep(now)

    def cut(self) -> None:
        """Close all connections immediately."""
        if self.connections:
            self._events["cut at the end of the shutdown"] += len(self.connections)
        for connection in list(self.connections):
            connection.transport.abort()

    def in_use(self) -> list[str]:
        """The path of each request that has not been answered completely."""
        busy = (connection for connection in self.connections if connection.look() in _WITH_REQUEST)
        return [connection.cycle.scope["path"] for connection in busy if connection.cycle is not None]

    def _look(self, connection: Connection, now: float, patience: Patience) -> None:
        stage = connection.look()
        if connection.transport.is_closing() and stage is not Stage.UNREAD:
            return
        mark = _mark(connection, stage)
        if stage is not connection.stage or mark != connection.mark:
            connection.stage, connection.mark, connection.since = stage, mark, now
        if connection.half_closed and peer.has_left(connection.socket):
            connection.transport.abort()
        elif self._ending and stage in _WITHOUT_REQUEST:
            connection.transport.close()
        elif self._ending and stage is Stage.BODY:
            connection.refuse(EngineUnavailable(SHUTTING_DOWN, retry_after_s=1.0))
        elif now - connection.since > (limit_s := self._limit_s(connection, stage, patience)):
            if stage is not Stage.IDLE:
                self.note(f"{stage.value} within {limit_s:g} s")
            _close(connection, stage, limit_s)

    def _limit_s(self, connection: Connection, stage: Stage, patience: Patience) -> float:
        match stage:
            case Stage.FRESH | Stage.HEAD:
                return patience.head_s
            case Stage.BODY:
                return patience.body_s
            case Stage.UNREAD:
                return patience.ending_s if self._ending else patience.unread_s
            case Stage.IDLE:
                assert connection.cycle is not None
                return patience.body_s if connection.cycle.more_body else patience.idle_s  # else a refused body
        return math.inf

    def _make_room(self, newest: Connection) -> bool:
        """Close connections that wait for their clients. Return False if there are none.

        Connections without a request come first, then connections of the host with the most, then the longest waiting.
        """
        if self._all_used or self._patience is None:
            return False
        now, waiting = newest.since, []
        for connection in self.connections:
            stage = connection.look()
            since = connection.since if stage is connection.stage else now
            if connection is not newest and now - since >= _SPARED_S[stage]:
                waiting.append((_ORDER[stage], -self._by_host.of[connection.sender], since, connection))
        waiting.sort(key=lambda entry: entry[:3])
        chosen = waiting[: max(1, len(self.connections) // _LARGEST_SHARE)]
        for *_, connection in chosen:
            self.note("made room for others")
            self.connections.discard(connection)  # or the next connection would also look for room
            connection.transport.abort()
        self._all_used = not chosen
        return bool(chosen)


class _Limited:
    """The application of a connection that is restricted to `WATCHED`. Other paths get `error`."""

    def __init__(self, app: ASGIApp, error: ProxyError, on_end: RequestEnd | None) -> None:
        self._app, self._error, self._on_end = app, error, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in WATCHED:
            await self._app(scope, receive, send)
        else:
            request = HttpRequest(scope, self._on_end)
            response = error_response(scope, self._error)
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            request.end(scope)


_WITHOUT_REQUEST = frozenset({Stage.FRESH, Stage.HEAD, Stage.IDLE})
_WITH_REQUEST = frozenset({Stage.BODY, Stage.REPLY, Stage.UNREAD})
_SPARED_S = {**dict.fromkeys(_WITHOUT_REQUEST, 0.0), Stage.BODY: 2.0, Stage.UNREAD: 10.0, Stage.REPLY: math.inf}
"""Seconds without progress after which a connection may be closed to make room."""

_STATES = {
    **dict.fromkeys(_WITHOUT_REQUEST, "idle"),
    Stage.BODY: "receiving",
    Stage.REPLY: "replying",
    Stage.UNREAD: "unread",
}
"""The names of the stages in metrics."""

_ORDER = {Stage.FRESH: 0, Stage.HEAD: 0, Stage.IDLE: 1, Stage.BODY: 2, Stage.UNREAD: 2}


def _mark(connection: Connection, stage: Stage) -> object:
    """A value that changes while the client makes progress in a stage."""
    if stage is Stage.UNREAD:
        return connection.transport.get_write_buffer_size(), peer.taken_bytes(connection.socket)
    if stage is Stage.BODY:
        waits = connection.flow.read_paused or (
            connection.cycle is not None and connection.cycle.waiting_for_100_continue
        )
        return object() if waits else connection.received // LEAST_BODY_BYTES  # it waits for the server, not its client
    return connection.cycle


def _close(connection: Connection, stage: Stage, limit_s: float) -> None:
    """Close the connection of a client that exceeded a timeout. A client that has begun a request gets an error."""
    if stage in (Stage.HEAD, Stage.BODY):
        connection.refuse(RequestTimeout(f"the request did not arrive: it {stage.value} within {limit_s:g} s"))
    elif stage is Stage.UNREAD:
        connection.transport.abort()
    else:
        connection.transport.close()
