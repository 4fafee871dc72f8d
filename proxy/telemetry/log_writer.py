"""The writer of log lines to a file descriptor. A stalled reader never blocks the process.

While the writer runs, records go into a queue, and a thread writes them, several at a time. If the queue is full, lines
are dropped and counted, and the count is written once there is room. Without the thread (in a supervisor, which forks,
and in a forked process) lines are written immediately, and dropped after a wait of one second.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue

from proxy.telemetry.log_lines import Line, LineFormatter, Told

MOST_WAITING = 10_000
"""The maximum number of records that wait for a reader."""

_GATHER_S = 0.02
"""Seconds in which records are gathered for one write. A thread that wakes for each line would take the interpreter
lock from the event loop each time."""
_AT_ONCE = 200
_FLUSH_S = 2.0
_DIRECT_S = 1.0


class LogWriter(logging.Handler):
    """Writes the lines of all records to `descriptor`. `lock`: a file that several processes lock for each write.

    A write to a pipe is atomic only up to 4 KiB, so longer lines of processes that share a pipe would be mixed.
    """

    def __init__(self, descriptor: int, lines: LineFormatter, lock: int | None = None) -> None:
        super().__init__()
        self.formatter: LineFormatter = lines
        self._descriptor, self._lock_file = descriptor, lock
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Begin without a thread and with an empty queue. After a fork, the parent writes the records in its queue."""
        self._queue: SimpleQueue[Told | threading.Event] = SimpleQueue()
        self._hurry: SimpleQueue[None] = SimpleQueue()
        self.running = False
        self._dropped = self._told = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="tokengrove-log", daemon=True)
        self._thread.start()
        self.running = True

    def take(self, line: Line) -> None:
        """Take a line while the thread runs."""
        if self._queue.qsize() >= MOST_WAITING:
            self._dropped += 1
        else:
            self._queue.put(line)

    def handle(self, record: logging.LogRecord) -> bool:
        """Take a record, without the lock of `logging.Handler`, which the queue does not need."""
        if self._thread is None:
            self._write_at_once(record)
        elif self._queue.qsize() >= MOST_WAITING:
            self._dropped += 1
        else:
            self._queue.put(record if isinstance(record.args, Mapping) else _settled(record))
        return True

    def flush(self) -> None:
        """Wait until all earlier records are written, for two seconds at most."""
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            written = threading.Event()
            self._queue.put(written)
            self._hurry.put(None)
            written.wait(_FLUSH_S)

    def _run(self) -> None:
        while True:
            waiting = [self._queue.get()]
            try:  # noqa: SIM105  # `suppress` would enter three functions for each line
                self._hurry.get(timeout=_GATHER_S)
            except Empty:
                pass
            for _ in range(min(self._queue.qsize(), _AT_ONCE)):
                waiting.append(self._queue.get())
            self._write(self._lines(waiting))
            for item in waiting:
                if isinstance(item, threading.Event):
                    item.set()

    def _lines(self, waiting: Sequence[Told | threading.Event]) -> bytes:
        lines: list[str] = []
        for item in waiting:
            if not isinstance(item, threading.Event):
                lines += (self.formatter.format(item), "\n")
        if dropped := self._dropped - self._told:  # two counters, because two threads change them
            self._told += dropped
            lines += (self.formatter.format(_dropped_lines(dropped)), "\n")
        return "".join(lines).encode("utf-8", "backslashreplace")

    def _write(self, data: bytes) -> None:
        """Write all of `data`, however long that takes. Do nothing if the reader is gone."""
        try:
            if self._lock_file is None:
                self._write_all(data)
            else:
                with self._alone():
                    self._write_all(data)
        except OSError:
            pass

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has made it non-blocking
                select.select((), (self._descriptor,), ())

    @contextlib.contextmanager
    def _alone(self, until: float = math.inf) -> Iterator[None]:
        """Hold the lock that all writing processes share. The system releases it if this process dies.

        Raises TimeoutError if another process still holds it at `until`, in seconds of the monotonic clock.
        """
        if self._lock_file is None:
            yield
            return
        import fcntl

        while True:
            try:
                fcntl.lockf(self._lock_file, fcntl.LOCK_EX if until == math.inf else fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                time.sleep(_DIRECT_S / 100)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    def _write_at_once(self, record: logging.LogRecord) -> None:
        """Write a record in this thread. Drop it if it cannot be written within a second."""
        until = time.monotonic() + _DIRECT_S
        data = self._lines([record])
        try:
            with self._alone(until):
                while data:
                    if not select.select((), (self._descriptor,), (), max(0.0, until - time.monotonic()))[1]:
                        raise TimeoutError
                    data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except TimeoutError:
            self._dropped += 1
        except OSError:
            pass  # the reader is gone


def _settled(record: logging.LogRecord) -> logging.LogRecord:
    """A copy of a record with its message formatted, since its arguments may change before it is written.

    A record that cannot be formatted is returned unchanged: the formatter reports it, and the caller continues.
    """
    settled = copy.copy(record)
    with contextlib.suppress(Exception):
        settled.msg, settled.args = record.getMessage(), None
    return settled


def _dropped_lines(count: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, "log lines dropped", ({"lines": count},), None)
