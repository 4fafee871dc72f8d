"""Calls of functions in other processes. A process that fails affects only its own call.

A process starts when it is needed, and is reused for later calls, one at a time. A process that dies, hangs or is
cancelled is replaced, and only its caller gets an error. A process imports the script of this program only if a call
needs its definitions.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import pickle
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from tokengrove.rollout import child_process
from tokengrove.rollout.failures import AgentFailed, WorkerDied
from tokengrove.rollout.function_worker import Job, Raised, Returned, Sent
from tokengrove.rollout.pickling import check_picklable
from tokengrove.rollout.script import script_of_this_process, stop_import
from tokengrove.rollout.threads import in_thread

_START_S = 120.0
_LOOK_S = 1.0
"""Seconds between checks whether a silent process has ended: if its children hold its pipe open, there is no other
sign.
"""


class ProcessPool:
    """At most `max_workers` processes. It may be used from several threads and event loops.

    `close` ends idle processes at once, and the others after their calls. Later calls start new processes, so several
    users may share a pool and close it. All processes end with the program.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers is {max_workers}; it must be at least 1")
        self._places = threading.Semaphore(max_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = 0  # the number of calls of `close`: processes from before the last one are not reused

    async def run(
        self,
        function: Callable[..., Any],
        *,
        variables: Mapping[str, str | None] | None = None,
        timeout_s: float | None = None,
        **arguments: Any,
    ) -> Any:
        """Call `function(**arguments)` in another process and return its result.

        `function`: a function of a module. `variables`: environment variables that are set during the call; None:
        unset. `timeout_s`: seconds that the call may take in the process, without the wait for a free one and its
        start; None: no limit. Raises TypeError if an argument cannot be pickled, AgentFailed for an exception of the
        function, WorkerDied if the process dies, and TimeoutError.
        """
        stop_import()
        call = _Call(Job(function, arguments, variables or {}), timeout_s)
        try:
            return await in_thread(partial(self._run, call), "tokengrove-process")
        except asyncio.CancelledError:
            call.cancel()
            raise

    def close(self) -> None:
        """End idle processes now, and each of the others after its call."""
        with self._lock:
            self._closed += 1
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def _run(self, call: _Call) -> Any:
        payload = _pickled(call.job)
        with self._places:
            closed, worker = self._take()
            try:
                answer = call.ask(worker, payload)
                self._keep(worker, closed)
            except BaseException:
                worker.end()
                raise
        return _value(answer)

    def _take(self) -> tuple[int, _Worker]:
        """A process for a call, and how often the pool was closed before."""
        with self._lock:
            while self._idle:
                if (worker := self._idle.pop()).is_usable():
                    return self._closed, worker
                worker.end()
            return self._closed, _Worker()

    def _keep(self, worker: _Worker, closed: int) -> None:
        """Keep a process for later calls if it can be reused, else end it."""
        with self._lock:
            if closed == self._closed and worker.is_usable():
                self._idle.append(worker)
                return
        worker.end()


def shared_pool(max_workers: int) -> ProcessPool:
    """The pool with `max_workers` processes that the whole program shares."""
    return _shared_pool(max_workers, os.getpid())


@cache
def _shared_pool(max_workers: int, owner: int) -> ProcessPool:
    """`owner`: the id of this process. A fork of it does not use its pools."""
    return ProcessPool(max_workers)


class _Call:
    """A call, which may be cancelled from another thread."""

    def __init__(self, job: Job, timeout_s: float | None) -> None:
        self.job, self._timeout_s = job, timeout_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._worker: _Worker | None = None

    def ask(self, worker: _Worker, payload: bytes) -> bytes:
        """Run the call in a process. Raises WorkerDied if the call was cancelled, and the errors of `_Worker.ask`."""
        with self._lock:
            if self._cancelled:
                raise WorkerDied("the call was cancelled before it began")
            self._worker = worker
        try:
            return worker.ask(payload, self._timeout_s)
        except TimeoutError:
            name = getattr(self.job.function, "__name__", "the function")
            raise TimeoutError(f"{name} has not ended within {self._timeout_s:g} s (timeout_s)") from None
        finally:
            with self._lock:
                self._worker = None

    def cancel(self) -> None:
        """Cancel the call, and kill the process if it runs the call."""
        with self._lock:
            self._cancelled = True
            if self._worker is not None:
                self._worker.kill()


class _Worker:
    """A process. It starts with its first call, and runs one call after the other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._killed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, self._other_end = multiprocessing.Pipe()

    def ask(self, payload: bytes, timeout_s: float | None) -> bytes:
        """Run a pickled call; return the pickled result. Raises WorkerDied if the process ends before it, and
        TimeoutError.
        """
        process = self._process or self._started()
        try:
            self._connection.send_bytes(payload)
            return self._received(process, timeout_s)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise WorkerDied(f"the process {child_process.fate(process)} before the call returned") from None

    def is_usable(self) -> bool:
        with self._lock:
            return not self._killed and self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the process and its children. A running `ask` then raises WorkerDied."""
        if os.getpid() != self._owner:
            return  # this process is a fork of the owner
        with self._lock:
            self._killed = True
            if self._process is not None:
                child_process.kill(self._process)

    def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.kill()
        if self._process is not None and os.getpid() == self._owner:
            self._process.wait()
        self._connection.close()
        self._other_end.close()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start the process, and wait until it can run calls. Raises WorkerDied, also after 120 s."""
        with self._lock:
            if self._killed:
                raise WorkerDied("the process was ended before it started")
            fd = self._other_end.fileno()
            process = self._process = child_process.started("tokengrove.rollout.function_worker", fd)
        self._other_end.close()
        _running.add(self)
        try:
            self._received(process, _START_S)
        except TimeoutError:
            raise WorkerDied(f"the process had not started within {_START_S:g} s") from None
        except (EOFError, OSError):
            fate = child_process.fate(process)
            raise WorkerDied(f"the process {fate} before it could run a call; see its messages on stderr") from None
        return process

    def _received(self, process: subprocess.Popen[bytes], timeout_s: float | None) -> bytes:
        """Wait for a message. Raises EOFError if the process is gone, and TimeoutError."""
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._connection.poll(max(0.0, min(_LOOK_S, until - time.monotonic()))):
            if process.poll() is not None and not self._connection.poll(0):
                raise EOFError
            if time.monotonic() >= until:
                raise TimeoutError
        return self._connection.recv_bytes()


def _pickled(job: Job) -> bytes:
    """The pickled job. Raises TypeError, which names the part of an argument that cannot be pickled."""
    try:
        return pickle.dumps(Sent(pickle.dumps(job), script_of_this_process()))
    except Exception:
        for name, value in job.arguments.items():
            check_picklable(name, value)
        raise


def _value(answer: bytes) -> Any:
    """The result of the function. Raises AgentFailed for an exception of the function."""
    try:
        told: Returned | Raised = pickle.loads(answer)
    except Exception as error:
        raise AgentFailed(
            type(error).__name__, f"the result of the other process cannot be unpickled: {error}"
        ) from None
    if isinstance(told, Raised):
        raise AgentFailed(told.kind, told.message, told.traceback)
    return told.value


_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for worker in list(_running):
        worker.end()
