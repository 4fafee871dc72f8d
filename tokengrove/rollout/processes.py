"""Functions in other processes, at most so many at once; a process that fails takes nothing with it but its own call.

A process is started when it is needed and used again, one call at a time. One that dies, hangs or is cancelled is
replaced, and only its caller gets an error. Processes import the script of this program only for what it defines.
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
"""How often a process that says nothing is looked at: one whose children hold its pipe open ends unnoticed."""


class ProcessPool:
    """At most `max_workers` processes. It may be used from several threads and event loops.

    `close` ends the processes that are idle, and the others after their calls; calls that follow start new ones. So
    several users may share a pool and close it. All processes end with the program.
    """

    def __init__(self, max_workers: int) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers is {max_workers}; there has to be a process")
        self._places = threading.Semaphore(max_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = 0  # how often: processes that are older than the last time are not used again

    async def run(
        self,
        function: Callable[..., Any],
        *,
        variables: Mapping[str, str | None] | None = None,
        timeout_s: float | None = None,
        **arguments: Any,
    ) -> Any:
        """Call `function(**arguments)` in another process and return what it returns.

        `function` is one of a module. `variables` are set in the environment while it runs (None: absent). Raises
        TypeError if an argument cannot be pickled, AgentFailed for what the function raises, WorkerDied if its process
        ends, and TimeoutError after `timeout_s` seconds in the process; waiting for a free one does not count.
        """
        stop_import()
        call = _Call(Job(function, arguments, variables or {}), timeout_s)
        try:
            return await in_thread(partial(self._run, call), "tokengrove-process")
        except asyncio.CancelledError:
            call.cancel()
            raise

    def close(self) -> None:
        """End the processes that are idle now, and each of the others after its call."""
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
        """Keep a process for later calls, if it may have some."""
        with self._lock:
            if closed == self._closed and worker.is_usable():
                self._idle.append(worker)
                return
        worker.end()


def shared_pool(max_workers: int) -> ProcessPool:
    """The pool of so many processes that all of this program share."""
    return _shared_pool(max_workers, os.getpid())


@cache
def _shared_pool(max_workers: int, owner: int) -> ProcessPool:
    """`owner` is this process: one that was forked of it has no part in its pools."""
    return ProcessPool(max_workers)


class _Call:
    """One call, which may be cancelled from another thread."""

    def __init__(self, job: Job, timeout_s: float | None) -> None:
        self.job, self._timeout_s = job, timeout_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._worker: _Worker | None = None

    def ask(self, worker: _Worker, payload: bytes) -> bytes:
        """Let a process answer, unless the call was cancelled. Raises what `_Worker.ask` does."""
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
        """Kill the process that runs the call, if it does run."""
        with self._lock:
            self._cancelled = True
            if self._worker is not None:
                self._worker.kill()


class _Worker:
    """A process, which starts with its first question and is asked one after the other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._killed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, self._other_end = multiprocessing.Pipe()

    def ask(self, payload: bytes, timeout_s: float | None) -> bytes:
        """Return the answer. Raises WorkerDied if the process ends before it, and TimeoutError."""
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
        """Kill the process and those that it has started; `ask` raises then."""
        if os.getpid() != self._owner:
            return  # this is a fork of the process whose worker it is
        with self._lock:
            self._killed = True
            if self._process is not None:
                child_process.kill(self._process)

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill()
        if self._process is not None and os.getpid() == self._owner:
            self._process.wait()
        self._connection.close()
        self._other_end.close()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it has imported what it needs. Raises WorkerDied."""
        with self._lock:
            if self._killed:
                raise WorkerDied("the process was ended before it started")
            fd = self._other_end.fileno()
            process = self._process = child_process.started("tokengrove.rollout.function_worker", fd)
        self._other_end.close()
        _running.add(self)
        try:
            self._received(process, _START_S)
        except (EOFError, OSError):
            fate = child_process.fate(process)
            raise WorkerDied(f"the process {fate} before it could run anything; see its messages on stderr") from None
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
    """Raises TypeError that names the argument, and the part of it, that cannot be pickled."""
    try:
        return pickle.dumps(Sent(pickle.dumps(job), script_of_this_process()))
    except Exception:
        for name, value in job.arguments.items():
            check_picklable(name, value)
        raise


def _value(answer: bytes) -> Any:
    """What the function returned. Raises AgentFailed for what it raised."""
    try:
        told: Returned | Raised = pickle.loads(answer)
    except Exception as error:
        raise AgentFailed(
            type(error).__name__, f"what the other process returned cannot be rebuilt here: {error}"
        ) from None
    if isinstance(told, Raised):
        raise AgentFailed(told.kind, told.message, told.traceback)
    return told.value


_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for worker in list(_running):
        worker.end()
