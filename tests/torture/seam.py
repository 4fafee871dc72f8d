"""What is replaced while a scenario runs: the clock, the threads and the random numbers. One place for all of it.

Stepped: the store's writer, its readers, all thread pools and `asyncio.to_thread`. Real, since no scenario in process
starts them, and left to the scenarios with real processes: the log writer, the threads of the transformers engine, the
span exporter, the progress lines, the threads and processes of uvicorn and the supervisor, and those of rollouts.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from proxy.store.writer import Writer
from tests.torture import fibres
from tests.torture.loop import SeededLoop

EPOCH_S = 1_800_000_000.0

STEPPED = (
    "proxy.store.writer",
    "proxy.store.absence",
    "tokengrove.roll.scheduler.group_queue_manager",
    "tokengrove.roll.scheduler.env_activity_monitor",
)
"""The modules whose threads, queues and locks are stepped."""


class WriterThread(fibres.Thread):
    """May be interrupted at each line between its transactions."""

    preempted = frozenset(function.__code__ for function in (Writer._run, Writer._take, Writer._ring, Writer._settle))


_threading = SimpleNamespace(
    Thread=WriterThread,
    Event=fibres.Event,
    Lock=fibres.Lock,
    RLock=fibres.Lock,
    Condition=fibres.Condition,
    current_thread=threading.current_thread,
    get_ident=threading.get_ident,
)


@contextmanager
def stepped(loop: SeededLoop) -> Iterator[None]:
    """Let the clock, the threads and the random numbers of this process be those of `loop`."""
    numbers = random.Random(loop.random.random())
    shutdown = concurrent.futures.ThreadPoolExecutor.shutdown

    def stop(executor: Any, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(executor, wait=False)
        if cancel_futures:
            loop.forget_jobs(executor)
        if wait:
            fibres.pause(lambda: not loop.slots(executor).running)

    with ExitStack() as stack:
        fibres.bind(loop)
        stack.callback(fibres.bind, None)

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        for name in STEPPED:
            module = importlib.import_module(name)
            replace(module, "threading", _threading)
            if hasattr(module, "SimpleQueue"):
                replace(module, "SimpleQueue", fibres.SimpleQueue)
        replace(concurrent.futures.ThreadPoolExecutor, "shutdown", stop)
        replace(time, "monotonic", loop.time)
        replace(time, "perf_counter", loop.time)
        replace(time, "time", lambda: EPOCH_S + loop.time())
        replace(time, "sleep", fibres.sleep)
        replace(os, "urandom", numbers.randbytes)
        replace(random, "_urandom", numbers.randbytes)
        replace(uuid, "uuid4", lambda: uuid.UUID(bytes=numbers.randbytes(16), version=4))
        yield
