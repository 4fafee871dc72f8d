"""Coroutines for blocking callers. They run in a thread, since the caller's thread may have a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(step: Coroutine[Any, Any, T]) -> T:
    """Run `step` to its end; return its result or raise its exception."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(step))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="tokengrove-openenv", daemon=True).start()
    return done.result()
