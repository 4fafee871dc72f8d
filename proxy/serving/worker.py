"""One of several worker processes, run by a supervisor: build the server, wait for the others, serve, stop.

The worker reports on a pipe that it is ready, listens on an order of the supervisor, and stops on a signal or when it
loses its supervisor. The signal may come twice for one stop, from a terminal and from the supervisor, so only an order
of the supervisor ends a worker immediately.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from starlette.applications import Starlette

from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.progress import hide_steps
from proxy.resources.memory import limit_arenas
from proxy.serving import server
from proxy.settings import Settings
from proxy.telemetry import log
from proxy.workers.group import Place
from tokengrove.errors import ConfigurationError

Banner = Callable[[Starlette, str, Settings], str]
Address = tuple[str, int]


class Order(Enum):
    """An order of the supervisor to a worker: serve the port, or end a graceful stop immediately."""

    LISTEN = 0
    STOP_NOW = 1


class Report(Enum):
    """A report of a worker to its supervisor.

    READY and LISTENING have the banner, FAILED the reason, and STOPPED an `Ended`. DIED is the supervisor's own: the
    worker has ended without a report.
    """

    READY = 0
    LISTENING = 1
    FAILED = 2
    STOPPED = 3
    DIED = 4


@dataclass(frozen=True, slots=True)
class Post:
    """The post of a worker: its place among the others, the pipe to its supervisor, and the addresses to listen on."""

    place: Place
    pipe: Connection
    addresses: server.Listeners[Address]
    banner: Banner


def work(settings: Settings, post: Post) -> None:
    """Run a worker until it is stopped. Call it in a new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the event loop handles it; the supervisor also receives it
    limit_arenas()
    log.start_writing(post.place.number)
    if not post.place.leads:
        hide_steps()
    try:
        app = build_app(settings, place=post.place)
        with (
            private_socket(Path(post.place.peers.address())) as private,
            asyncio.Runner(loop_factory=server.loop_factory()) as runner,
        ):
            runner.run(_Worker(app, settings, post).serve(private))
    except ConfigurationError as error:
        post.pipe.send((Report.FAILED, str(error)))


class _Worker:
    """A worker with a built application."""

    def __init__(self, app: App, settings: Settings, post: Post) -> None:
        self._app, self._settings, self._post = app, settings, post
        self._public = server.Servers(app, settings, post.place)
        self._private = server.new_server(app.state.for_workers, settings, patience=None)
        self._may_listen = asyncio.Event()
        self._stopping = False

    async def serve(self, private: socket.socket) -> None:
        """Answer the other workers, start the engine, and then serve the port. Raises ConfigurationError."""
        server.tune_interpreter(own_process=True)
        answering = asyncio.create_task(self._private.serve(sockets=[private]))
        try:
            async with self._app.router.lifespan_context(self._app):
                self._follow_orders()
                await self._serve_port(answering)
        finally:
            self._private.should_exit = self._private.force_exit = True
            await answering

    async def _serve_port(self, answering: asyncio.Task[None]) -> None:
        with ExitStack() as stack:
            addresses = self._post.addresses
            main, agents = (
                [stack.enter_context(shared_socket(each)) for each in group]
                for group in (addresses.main, addresses.agents)
            )
            url = server.url_of(self._settings.host, main[0])
            banner = partial(self._post.banner, self._app, url, self._settings)
            self._say(Report.READY, banner())
            await self._may_listen.wait()
            self._public.limit_connections()
            stopping = server.Stopping(self._app, self._settings, told=False)
            ending = asyncio.create_task(stopping.end_requests(*self._public, self._private))
            if not self._stopping:
                for listener in (*main, *agents):
                    listener.listen(server.BACKLOG)
                try:
                    await self._public.serve(
                        server.Listeners(main, agents), lambda: self._say(Report.LISTENING, banner())
                    )
                except ConfigurationError:
                    self._stop()
                    raise
            await answering  # the requests of other workers have also been answered
            ending.cancel()
            await stopping.cut(*self._public, self._private)
            self._say(Report.STOPPED, stopping.ended)

    def _follow_orders(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._post.pipe.fileno(), self._take_order)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)

    def _take_order(self) -> None:
        try:
            order = self._post.pipe.recv()
        except (EOFError, OSError):  # the supervisor has ended
            asyncio.get_running_loop().remove_reader(self._post.pipe.fileno())
            self._stop()
            return
        if order is Order.LISTEN:
            self._may_listen.set()
        else:
            self._stop()
            for each in (*self._public, self._private):
                each.force_exit = True

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._may_listen.set()
            for each in (*self._public, self._private):
                each.ask_to_exit()

    def _say(self, report: Report, what: object) -> None:
        with suppress(OSError):  # the supervisor has ended; the worker then stops on its own
            self._post.pipe.send((report, what))


def shared_socket(address: Address) -> socket.socket:
    """This process's own socket on the shared port. It gets its share of the connections once it listens."""
    listener = server.new_socket(address[0])
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(address)
    return listener


def private_socket(path: Path) -> socket.socket:
    """A listening Unix socket, which replaces the socket of this worker before a restart.

    Raises ConfigurationError if the socket cannot be created.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot create the socket {path}: {error}; set TMPDIR to a shorter path") from None
    listener.listen(server.BACKLOG)
    return listener
