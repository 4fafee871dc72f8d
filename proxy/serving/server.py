"""One server process: bind the port, start, and shut down gracefully on SIGTERM or SIGINT.

The shutdown answers long polls immediately, lets running turns finish within `--shutdown-timeout-s`, and cancels the
others. Then the lifespan of `app` closes the engine, and the store last, with every write flushed. A second signal
cancels all running turns immediately. `proxy.serving.stop` logs all this.

Every failure to start is a ConfigurationError with a one-line message, raised before the first request is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.resources.garbage import freeze_survivors
from proxy.resources.memory import limit_arenas, return_freed_memory
from proxy.serving.connection import Connection
from proxy.serving.connections import Connections, Patience
from proxy.serving.open_files import raise_limit, room_for_connections
from proxy.serving.stop import LOOK_S, SIGNALS, Ended, Left, Stop
from proxy.settings import Settings
from proxy.telemetry.http_request import RequestEnd
from tokengrove.errors import ConfigurationError

logger = logging.getLogger(__name__)

BACKLOG = 2048
# Seconds after `--shutdown-timeout-s` until uvicorn cancels what still runs. Everything is cut before that.
BACKSTOP_S = 5
PATIENCE = Patience()
_LOOKS, _LOOK_S = 30, 0.01
_START_TIMEOUT_S = 120.0
_SWITCH_INTERVAL_S = 0.001
_EXPORTS = ("/trajectories/export", "/export_trajectories")
_COUNTED = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket")
"""The beginnings of uvicorn's warnings about single requests, which are counted instead."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers. They re-raise the signal at the end, so the exit code would not be 0."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.server_state = self.connections = connections
        self.exiting = asyncio.Event()

    def ask_to_exit(self) -> None:
        """Shut down gracefully. A second call shuts down immediately."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.exiting.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve and watch the connections until asked to exit."""
        watching = asyncio.create_task(self.connections.watch())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, and wait for requests that have arrived completely."""
        self.connections.end(asyncio.get_running_loop().time())
        await super().shutdown(sockets)

    async def cut(self) -> None:
        """Close every connection and cancel every request, after at most 0.3 s for replies that are being written."""
        await self._settle()
        self.connections.cut()
        await self._settle()
        for task in self.connections.tasks:
            task.cancel()
        self.connections.log()

    async def _settle(self) -> None:
        for _ in range(_LOOKS):
            if not (self.connections.connections or self.connections.tasks):
                break
            await asyncio.sleep(_LOOK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: Settings, on_ready: Callable[[Starlette, str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `on_ready` is called with the app and its URL once it listens.

    Raises ConfigurationError if the server cannot start.
    """
    raise_limit()
    limit_arenas()
    with listening(settings) as listeners:
        app = build_app(settings)
        runner = asyncio.Runner(loop_factory=loop_factory())
        with runner:
            stopping = Stopping(app, settings)
            runner.run(_serve(app, settings, listeners, on_ready, stopping, signals=True))
        stopping.end()


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Run a server in a thread of this process while the block runs, and yield its URL.

    Raises the errors of its start, and ConfigurationError if the start takes longer than two minutes.
    """
    with listening(settings) as listeners:
        app = build_app(settings)
        ready: list[str] = []
        failure: list[BaseException] = []
        stop = threading.Event()
        started = threading.Event()

        def on_ready(app: Starlette, url: str) -> None:
            ready.append(url)
            started.set()

        def target() -> None:
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    stopping = Stopping(app, settings)
                    runner.run(_serve(app, settings, listeners, on_ready, stopping, signals=False, stop=stop))
            except BaseException as error:
                failure.append(error)
            finally:
                started.set()

        thread = threading.Thread(target=target, name="tokengrove-server")
        thread.start()
        try:
            in_time = started.wait(_START_TIMEOUT_S)
            if failure:
                raise failure[0]
            if not in_time:
                raise ConfigurationError(f"the server did not start within {_START_TIMEOUT_S:g} s")
            yield ready[0]
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[Sequence[socket.socket]]:
    """The listening sockets of a server: for `--port`, and for `--metrics-port` if set.

    Raises ConfigurationError if a port is in use or the address is not local.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(bind(settings, settings.port, "--port"))]
        if settings.metrics_port is not None:
            sockets.append(stack.enter_context(bind(settings, settings.metrics_port, "--metrics-port")))
        yield sockets


def bind(settings: Settings, port: int, flag: str) -> socket.socket:
    """Return a listening socket. `flag`: the flag of its port. Raises ConfigurationError."""
    listener = new_socket(settings)
    try:
        listener.bind((settings.host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{port}: {error.strerror or error}; {_way_out(settings, error, flag)}"
        ) from None
    return listener


def _way_out(settings: Settings, error: OSError, flag: str) -> str:
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
        return f"--host {settings.host} is no address of this machine: give one that is, 127.0.0.1, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"only privileged users may listen on such a port: choose a {flag} from 1024 on"
    return f"choose another {flag}"


def new_socket(settings: Settings) -> socket.socket:
    """A socket of the family of `--host`, not yet bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


async def _serve(
    app: App,
    settings: Settings,
    listeners: Sequence[socket.socket],
    on_ready: Callable[[Starlette, str], None],
    stopping: Stopping,
    *,
    signals: bool,
    stop: threading.Event | None = None,
) -> None:
    server = new_server(app, settings, on_end=app.on_end)
    tune_interpreter(own_process=signals)
    async with app.router.lifespan_context(app):
        if signals:
            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, server.ask_to_exit)
        watcher = asyncio.create_task(_watch(stop, server)) if stop is not None else None
        limit_connections(server, settings)
        server.connections.show(app.state.metrics.process, app.state.senders)
        on_ready(app, url_of(settings, listeners[0]))
        ending = asyncio.create_task(stopping.end_requests(server))
        await server.serve(sockets=list(listeners))
        ending.cancel()
        await stopping.cut(server)
        if watcher is not None:
            await watcher


def new_server(
    app: ASGIApp, settings: Settings, patience: Patience | None = PATIENCE, on_end: RequestEnd | None = None
) -> Server:
    """A server of `app`, without sockets. `patience`: the timeouts of clients; None for trusted clients.

    `on_end`: called with the records of requests that do not reach `app`. uvicorn's own limits are not sufficient:
    `limit_concurrency` also refuses `/health` and keeps silent connections, a silent connection has no timeout before
    its first request, and its header limits apply to another parser.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s) + BACKSTOP_S,
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,
    )
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.setLevel(logging.WARNING)
    uvicorn_log.addFilter(_is_news)
    return Server(config, Connections(patience, on_end))


def _is_news(record: logging.LogRecord) -> bool:
    """True unless a record of uvicorn is already counted, or is the traceback of a request cancelled at shutdown."""
    if record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return not str(record.msg).startswith(_COUNTED)


def limit_connections(server: Server, settings: Settings) -> None:
    """Set the limit of connections of a server: `--max-connections`, or fewer if the limit of open files is lower."""
    elsewhere = "//" in settings.engine or settings.workers > 1  # each request may then need a second connection
    room, wanted = room_for_connections(2 if elsewhere else 1), settings.max_connections
    if wanted > room:
        logger.warning(
            "the limit of open files has room for %d connections, not for --max-connections %d: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE)",
            room,
            wanted,
        )
    server.connections.most = min(wanted, room)
    server.connections.metrics_port = settings.metrics_port


def url_of(settings: Settings, listener: socket.socket) -> str:
    """The URL at which `listener` can be reached."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def tune_interpreter(*, own_process: bool) -> None:
    """Tune the interpreter for latency: pause briefly for garbage, and switch threads sooner.

    The imported libraries have a million objects that are never freed. A full collection of them would stall every
    request for 0.1 s, so they are frozen, like the sessions later. In a process that is not the server's own, the
    collector is left alone: cycles among frozen objects of a trainer would never be freed.

    The database writer thread releases the interpreter lock at each database call. While the event loop is busy, it
    would get the lock back only after the default switch interval of 5 ms, several times per commit.
    """
    if own_process:
        freeze_survivors()
    return_freed_memory()  # loading a large vocabulary frees 150 MB
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


class Stopping:
    """The end of all requests of one server process. `told` False: another process logs the progress of the stop."""

    def __init__(self, app: Starlette, settings: Settings, *, told: bool = True) -> None:
        self._app, self._timeout_s, self._told = app, settings.shutdown_timeout_s, told
        self._stop: Stop | None = None
        self._interrupted = 0
        self._finished_before = 0

    @property
    def ended(self) -> Ended:
        """The turns that have ended since the stop began."""
        return Ended(self._app.state.turns.finished - self._finished_before, self._interrupted)

    async def end_requests(self, *servers: Server) -> None:
        """Wait until the first server is asked to exit. Then end long polls, and wait for requests within the timeout.

        Turns that take longer are cancelled, and their clients get an error. Then everything else is cut.
        """
        await servers[0].exiting.wait()
        turns = self._app.state.turns
        self._finished_before = turns.finished
        self._app.state.polls.end()
        self._app.state.store.database.absence.stop()  # calls no longer wait for an unavailable database
        if self._told:
            self._stop = Stop(self._timeout_s, self._left(servers))
        telling = asyncio.create_task(self._tell(servers))
        try:
            loop = asyncio.get_running_loop()
            ends_at = loop.time() + self._timeout_s
            await self._drain(self._timeout_s)
            await asyncio.sleep(ends_at - loop.time())
            for server in servers:
                await server.cut()
        finally:
            telling.cancel()

    async def cut(self, *servers: Server) -> None:
        """End everything that still runs: turns without a client, or after a second signal, everything."""
        if self._stop is not None and servers[0].force_exit:
            self._stop.at_once()
        await self._drain(0.0)
        for server in servers:
            await server.cut()

    def end(self) -> None:
        """Log that the server has stopped, once its engine and its store are closed."""
        if self._stop is not None:
            self._stop.end(self.ended)

    async def _drain(self, timeout_s: float) -> None:
        interrupted = await self._app.state.turns.drain(timeout_s)
        self._interrupted += interrupted
        if self._stop is not None:
            self._stop.interrupt(interrupted)

    async def _tell(self, servers: Sequence[Server]) -> None:
        while self._stop is not None:
            await asyncio.sleep(LOOK_S)
            self._stop.look(self._left(servers))

    def _left(self, servers: Sequence[Server]) -> Left:
        paths = [path for server in servers for path in server.connections.in_use()]
        exports = sum(path.endswith(_EXPORTS) for path in paths)
        return Left(self._app.state.turns.running.count, exports, len(paths))


async def _watch(stop: threading.Event, server: Server) -> None:
    await asyncio.to_thread(stop.wait)
    server.ask_to_exit()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop
