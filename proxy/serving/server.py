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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from proxy.api.agent_listener import AgentListener
from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.progress import doing
from proxy.resources.garbage import freeze_survivors
from proxy.resources.memory import limit_arenas, return_freed_memory
from proxy.serving.connection import Connection
from proxy.serving.connections import Connections, Patience
from proxy.serving.open_files import raise_limit, room_for_connections
from proxy.serving.stop import LOOK_S, SIGNALS, Ended, Left, Stop
from proxy.serving.tunnel import EXPOSED_FILE, ExposedUrl, Tunnel
from proxy.settings import Settings
from proxy.telemetry.http_request import RequestEnd
from proxy.workers.group import Place
from tokengrove.errors import ConfigurationError

logger = logging.getLogger(__name__)

BACKLOG = 2048
# Seconds after `--shutdown-timeout-s` until uvicorn cancels what still runs. Everything is cut before that.
BACKSTOP_S = 5
PATIENCE = Patience()
AGENT_PATIENCE = Patience(unread_s=60.0, idle_s=120.0)
"""The timeouts of agents on other machines. Tunnels and gateways reuse a connection that was idle for up to 90 s, and a
request that meets its end is not repeated."""
_LOOKS, _LOOK_S = 30, 0.01
_START_TIMEOUT_S = 120.0
_SWITCH_INTERVAL_S = 0.001
_EXPORTS = ("/trajectories/export", "/export_trajectories")
_COUNTED = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket")
"""The beginnings of uvicorn's warnings about single requests, which are counted instead."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listeners(Generic[T]):
    """What there is for each port: `main` of `--port` (first) and `--metrics-port`, `agents` of `--agent-port`."""

    main: Sequence[T]
    agents: Sequence[T] = ()


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
def listening(settings: Settings) -> Iterator[Listeners[socket.socket]]:
    """The listening sockets of a server.

    Raises ConfigurationError if a port is in use or the address is not local.
    """
    with contextlib.ExitStack() as stack:
        main = [stack.enter_context(bind(settings.host, settings.port, "--port"))]
        if settings.metrics_port is not None:
            main.append(stack.enter_context(bind(settings.host, settings.metrics_port, "--metrics-port")))
        agents, address = [], settings.agent_address
        if address is not None:
            flag = "--host" if settings.agent_host is None else "--agent-host"
            agents.append(stack.enter_context(bind(*address, "--agent-port", flag)))
        yield Listeners(main, agents)


def bind(host: str, port: int, flag: str, host_flag: str = "--host") -> socket.socket:
    """Return a listening socket. `flag`, `host_flag`: the flags of its port and its host. Raises ConfigurationError."""
    listener = new_socket(host)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; {_way_out(host, error, flag, host_flag)}"
        ) from None
    return listener


def _way_out(host: str, error: OSError, flag: str, host_flag: str) -> str:
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
        return f"{host_flag} {host} is no address of this machine: give one that is, 127.0.0.1, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"only privileged users may listen on such a port: choose a {flag} from 1024 on"
    return f"choose another {flag}"


def new_socket(host: str) -> socket.socket:
    """A socket of the family of `host`, not yet bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


async def _serve(
    app: App,
    settings: Settings,
    listeners: Listeners[socket.socket],
    on_ready: Callable[[Starlette, str], None],
    stopping: Stopping,
    *,
    signals: bool,
    stop: threading.Event | None = None,
) -> None:
    servers = Servers(app, settings)
    tune_interpreter(own_process=signals)
    async with app.router.lifespan_context(app):
        if signals:
            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, servers.ask_to_exit)
        watcher = asyncio.create_task(_watch(stop, servers)) if stop is not None else None
        servers.limit_connections()
        ending = asyncio.create_task(stopping.end_requests(*servers))
        try:
            await servers.serve(listeners, lambda: on_ready(app, url_of(settings.host, listeners.main[0])))
        finally:
            ending.cancel()
            if stop is not None:
                stop.set()  # after a failure to start, nobody else ends the watcher
        await stopping.cut(*servers)
        if watcher is not None:
            await watcher


class Servers:
    """The servers of one process: that of `--port`, and that of `--agent-port` if there is one. Both stop together.

    `place`: that of this process among workers, of which the leading one runs the tunnel.
    """

    def __init__(self, app: App, settings: Settings, place: Place | None = None) -> None:
        self._app, self._settings, self._place = app, settings, place
        self.main = new_server(app, settings, on_end=app.on_end)
        agents: AgentListener | None = app.state.agents
        self.agents = None if agents is None else new_server(agents, settings, AGENT_PATIENCE, agents.on_end)

    def __iter__(self) -> Iterator[Server]:
        yield self.main
        if self.agents is not None:
            yield self.agents

    def ask_to_exit(self) -> None:
        """Shut down gracefully. A second call shuts down immediately."""
        for server in self:
            server.ask_to_exit()

    def limit_connections(self) -> None:
        """Set the limits of connections, and show those of `--port` in the metrics."""
        settings, state = self._settings, self._app.state
        wanted = {self.main: settings.max_connections}
        if self.agents is not None:
            wanted[self.agents] = settings.agent_max_connections
        limit_connections(wanted, settings)
        self.main.connections.show(state.metrics.process, state.senders)

    async def serve(self, listeners: Listeners[socket.socket], ready: Callable[[], None]) -> None:
        """Serve until asked to exit. `ready` is called once agents can reach the server, with `--expose` from outside.

        Raises ConfigurationError if the tunnel does not start.
        """
        addresses, settings = self._app.state.addresses, self._settings
        serving = [asyncio.create_task(self.main.serve(sockets=list(listeners.main)))]
        tunnel: Tunnel | None = None
        if self.agents is not None and settings.agent_address is not None:
            serving.append(asyncio.create_task(self.agents.serve(sockets=list(listeners.agents))))
            addresses.agent_port = port = listeners.agents[0].getsockname()[1]
            if settings.expose is not None:
                url = ExposedUrl(None if self._place is None else self._place.folder / EXPOSED_FILE)
                addresses.exposed = url.get
                if self._place is None or self._place.leads:
                    host = settings.agent_address[0]
                    tunnel = Tunnel(settings.expose, host, port, settings.expose_timeout_s, url)
        if tunnel is None:
            ready()
            await asyncio.gather(*serving)
            return
        running = asyncio.create_task(tunnel.run())
        try:
            with doing(f"waiting for the URL of the tunnel ({settings.expose})"):
                first: list[asyncio.Future[Any]] = [tunnel.started, running, *serving]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if tunnel.started.done():
                    tunnel.started.result()
            if not self.main.should_exit:
                ready()
            await asyncio.gather(*serving)
        finally:
            running.cancel()
            await asyncio.wait((running,))
            for _ in range(2):  # at once, after a failure to start
                if not serving[0].done():
                    self.ask_to_exit()
            await asyncio.gather(*serving)


def new_server(
    app: ASGIApp, settings: Settings, patience: Patience | None = PATIENCE, on_end: RequestEnd | None = None
) -> Server:
    """A server of `app`, without sockets. `patience`: the timeouts of clients; None for trusted clients.

    `on_end`: called with the records of requests that do not reach `app`. uvicorn's own limits are not sufficient:
    `limit_concurrency` also refuses `/health` and keeps silent connections, a silent connection has no timeout before
    its first request, and its header limits apply to another parser.
    """
    keep_alive_s = 75.0 if patience is None else patience.idle_s
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s) + BACKSTOP_S,
        timeout_keep_alive=int(keep_alive_s),
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


def limit_connections(limits: Mapping[Server, int], settings: Settings) -> None:
    """Set the limits of connections of servers: those given, or less if the limit of open files has no room for all."""
    elsewhere = "//" in settings.engine or settings.workers > 1  # each request may then need a second connection
    room, wanted = room_for_connections(2 if elsewhere else 1), sum(limits.values())
    if wanted > room:
        also = " and --agent-max-connections" if len(limits) > 1 else ""
        logger.warning(
            f"the limit of open files has room for %d connections, not for --max-connections{also} %d: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE)",
            room,
            wanted,
        )
    for server, most in limits.items():
        server.connections.most = min(most, max(1, most * room // wanted))
        server.connections.metrics_port = settings.metrics_port


def url_of(host: str, listener: socket.socket) -> str:
    """The URL at which `listener` can be reached."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


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


async def _watch(stop: threading.Event, servers: Servers) -> None:
    await asyncio.to_thread(stop.wait)
    servers.ask_to_exit()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop
