"""The supervisor of several workers on one port: starts all or none, restarts workers that die, and stops all.

The supervisor does not serve requests. It forks the workers before it has a thread or an event loop, so it can fork
again when a worker dies. A worker that dies unexpectedly is logged and restarted, as in gunicorn and uvicorn, while the
others continue to serve. On SIGTERM or SIGINT, all workers stop gracefully at the same time; on a second signal,
immediately.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from proxy.app import check
from proxy.hub import pinned
from proxy.progress import doing
from proxy.serving import server, worker
from proxy.serving.open_files import raise_limit
from proxy.serving.stop import LOOK_S, SIGNALS, Ended, Left, Stop
from proxy.serving.tunnel import EXPOSED_FILE
from proxy.serving.worker import Address, Banner, Order, Post, Report, shared_socket
from proxy.settings import Settings
from proxy.workers.attempt_table import AttemptTable
from proxy.workers.group import Place
from proxy.workers.leader import LEADER
from tokengrove.errors import ConfigurationError

logger = logging.getLogger(__name__)

_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 30.0
"""Seconds before the restart of a worker that died before it was ready, doubled each time, and their maximum."""

_KILL_S = 10.0
"""Seconds beyond all timeouts after which a worker that does not stop is killed."""


def run(settings: Settings, banner: Banner, show: Callable[[str], None]) -> None:
    """Serve with `--workers` processes until SIGTERM or SIGINT. `show` is called with the banner once all listen.

    Raises ConfigurationError if a worker cannot start; then no worker is left running.
    """
    if not hasattr(os, "fork") or not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigurationError("--workers needs fork and SO_REUSEPORT, which this system does not have")
    raise_limit()
    settings = pinned(settings)  # here, so that all workers use the same commit
    check(settings)
    with _reserved(settings) as addresses, tempfile.TemporaryDirectory(prefix="tokengrove-workers-") as folder:
        supervisor = _Supervisor(settings, banner, addresses, Path(folder))
        with _signals(supervisor.stop) as wakened:
            supervisor.run(show, wakened)


@dataclass(slots=True)
class _Running:
    """A worker process. `listening`: it serves the port. `tries`: the number of consecutive failed starts."""

    process: BaseProcess
    pipe: Connection
    listening: bool = False
    tries: int = 0


class _Supervisor:
    def __init__(self, settings: Settings, banner: Banner, addresses: server.Listeners[Address], folder: Path) -> None:
        self._settings, self._banner, self._addresses, self._folder = settings, banner, addresses, folder
        self._attempt_table = AttemptTable(settings.workers, settings.max_turns_in_flight)
        self._workers: dict[int, _Running] = {}
        self._again: dict[int, tuple[float, int]] = {}
        self._stops = 0
        self._banner_text = ""

    def stop(self) -> None:
        """Stop all workers gracefully. A second call stops them immediately."""
        self._stops += 1

    def run(self, show: Callable[[str], None], wakened: socket.socket) -> None:
        """Start all workers, watch them, and return once all have stopped. Raises ConfigurationError."""
        try:
            with doing(f"starting {self._settings.workers} workers"):
                for number in range(self._settings.workers):
                    self._start(number, 0)
                self._until_ready(wakened)
            for running in self._workers.values():
                _tell(running, Order.LISTEN)
            while not self._stops:
                self._look(wakened, show)
        finally:
            self._end(wakened)

    def _start(self, number: int, tries: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        post = Post(Place(number, self._attempt_table, self._folder), theirs, self._addresses, self._banner)
        inherited = [ours, *(running.pipe for running in self._workers.values())]
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self._settings, post, inherited), name=f"tokengrove-worker-{number}"
        )
        with _held_back():
            process.start()
        theirs.close()
        self._workers[number] = _Running(process, ours, tries=tries)

    def _until_ready(self, wakened: socket.socket) -> None:
        """Wait until all workers are ready. Raises ConfigurationError if one cannot start."""
        ready: set[int] = set()
        while len(ready) < len(self._workers) and not self._stops:
            for number in self._speaking(wakened, None):
                report, text = _hear(self._workers[number])
                if report is Report.READY:
                    ready.add(number)
                    self._banner_text = text
                else:
                    raise ConfigurationError(text)

    def _look(self, wakened: socket.socket, show: Callable[[str], None]) -> None:
        """Wait for a report of a worker or a signal, and restart the workers that are due."""
        due = [at for at, _ in self._again.values()]
        for number in self._speaking(wakened, max(0.0, min(due) - time.monotonic()) if due else None):
            running = self._workers[number]
            report, text = _hear(running)
            if report is Report.READY:
                _tell(running, Order.LISTEN)
            elif report is Report.LISTENING:
                running.listening, running.tries = True, 0
                if self._banner_text and number == LEADER:
                    self._banner_text = text
                if self._banner_text and len(self._workers) == self._settings.workers and self._all_listen():
                    show(self._banner_text)
                    self._banner_text = ""
            elif report is Report.FAILED and self._banner_text:
                raise ConfigurationError(text)
            else:
                self._bury(number, text)
        for number, (at, tries) in list(self._again.items()):
            if at <= time.monotonic() and not self._stops:
                del self._again[number]
                self._start(number, tries)

    def _all_listen(self) -> bool:
        return all(running.listening for running in self._workers.values())

    def _bury(self, number: int, why: str) -> None:
        """Handle the death of a worker: clear its attempts, and schedule its restart, later after each failed start."""
        dead = self._workers.pop(number)
        dead.process.join()
        dead.pipe.close()
        self._attempt_table.clear(number)
        if number == LEADER:
            (self._folder / EXPOSED_FILE).unlink(missing_ok=True)
        tries = 0 if dead.listening else dead.tries + 1
        delay_s = min(_AGAIN_S * 2.0 ** (tries - 1), _LONGEST_AGAIN_S) if tries else 0.0
        self._again[number] = (time.monotonic() + delay_s, tries)
        logger.error("%s; worker %d is started again", why, number)

    def _end(self, wakened: socket.socket) -> None:
        """Stop all workers and wait for them. Kill workers that do not end in time."""
        told = 0
        stop = Stop(self._settings.shutdown_timeout_s, self._left()) if self._stops else None
        limit = time.monotonic() + self._settings.shutdown_timeout_s + server.BACKSTOP_S + _KILL_S
        while alive := [running for running in self._workers.values() if running.process.is_alive()]:
            if told < max(self._stops, 1):
                told = max(self._stops, 1)
                if stop is not None and told > 1:
                    stop.at_once()
                for running in alive:
                    running.process.terminate()
                    if told > 1:
                        _tell(running, Order.STOP_NOW)
            left_s = min(limit - time.monotonic(), LOOK_S)
            wait([wakened, *(running.process.sentinel for running in alive)], timeout=left_s)
            _drain(wakened)
            if stop is not None:
                stop.look(self._left())
            if time.monotonic() >= limit:
                for running in alive:
                    running.process.kill()
        for running in self._workers.values():
            running.process.join()
        if stop is not None:
            ended = [_ended(running) for running in self._workers.values()]
            stop.interrupt(sum(each.interrupted for each in ended))
            stop.end(Ended(*map(sum, zip(Ended(), *ended, strict=True))))

    def _left(self) -> Left:
        return Left(self._attempt_table.turns())

    def _speaking(self, wakened: socket.socket, timeout_s: float | None) -> Sequence[int]:
        """Wait; return the workers that have sent a report or have ended."""
        pipes: dict[Any, int] = {running.pipe: number for number, running in self._workers.items()}
        heard = wait([wakened, *pipes], timeout=timeout_s)
        _drain(wakened)
        return [pipes[pipe] for pipe in heard if pipe in pipes]


def _work(settings: Settings, post: Post, inherited: Sequence[Connection]) -> None:
    """The main function of a worker process. The process ends with `work`, so no thread can delay the supervisor."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for pipe in inherited:  # else the others would not notice the end of the supervisor
            pipe.close()
        worker.work(settings, post)
        code = 0
    except Exception:
        logger.exception("a worker failed")
    finally:
        logging.shutdown()
        os._exit(code)


def _hear(running: _Running) -> tuple[Report, str]:
    """The report of a worker, or DIED with the reason if it has ended."""
    with suppress(EOFError, OSError):
        report: tuple[Report, str] = running.pipe.recv()
        while report[0] is Report.STOPPED:  # by a signal to this worker alone; the end of the process follows
            report = running.pipe.recv()
        return report
    running.process.join()
    code, name = running.process.exitcode or 0, running.process.name
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Report.DIED, f"{name} (process {running.process.pid}) {how}"


def _ended(running: _Running) -> Ended:
    """The turns that ended on a worker during its stop, from its last report."""
    with suppress(EOFError, OSError):
        while True:
            report, what = running.pipe.recv()
            if report is Report.STOPPED:
                return Ended(*what)
    return Ended()


def _tell(running: _Running, order: Order) -> None:
    with suppress(OSError):  # it has ended
        running.pipe.send(order)


def _drain(wakened: socket.socket) -> None:
    with suppress(BlockingIOError):
        while wakened.recv(1024):
            pass


@contextmanager
def _reserved(settings: Settings) -> Iterator[server.Listeners[Address]]:
    """Reserve the addresses for the workers, which also bind to them. Raises ConfigurationError if one is in use."""
    with server.listening(settings) as alone:  # without SO_REUSEPORT, so it fails if another server has a port
        addresses = server.Listeners(
            [listener.getsockname() for listener in alone.main], [listener.getsockname() for listener in alone.agents]
        )
    with ExitStack() as stack:
        for address in (*addresses.main, *addresses.agents):
            stack.enter_context(shared_socket(address))
        yield addresses


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[socket.socket]:
    """Call `stop` on SIGTERM and SIGINT. Yields a socket that any signal makes readable, which wakes a wait."""
    wakened, waking = socket.socketpair()
    with wakened, waking:
        wakened.setblocking(False)
        waking.setblocking(False)
        before = [signal.signal(number, lambda *_: stop()) for number in SIGNALS]
        descriptor = signal.set_wakeup_fd(waking.fileno())
        try:
            yield wakened
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


@contextmanager
def _held_back() -> Iterator[None]:
    """Block signals. A worker forked meanwhile receives them once it has removed the supervisor's handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
