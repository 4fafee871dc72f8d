"""Times parts of a loop, and writes what ran for which sample to the log of level debug."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

_logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_attributes: ContextVar[dict[str, Any] | None] = ContextVar("rollout_trace_attributes", default=None)


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, Any]) -> Iterator[None]:
    """Add the seconds that the block takes to `timing_raw[name]`, also if it raises."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


@contextmanager
def rollout_trace_attr(
    sample_index: Any = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Name the sample that runs in the block; `rollout_trace_op` logs it. With `trace` false nothing is logged."""
    told = {"name": name, "step": step, "sample_index": sample_index, "rollout_n": rollout_n, "validate": validate}
    token = _attributes.set(told if trace else None)
    try:
        yield
    finally:
        _attributes.reset(token)


def rollout_trace_op(func: Callable[_P, Coroutine[Any, Any, _R]]) -> Callable[_P, Coroutine[Any, Any, _R]]:
    """Log how long each call of an asynchronous method takes and how it ends, within `rollout_trace_attr`.

    The tokens themselves are in the session: the server records every call of the model.
    """

    @functools.wraps(func)
    async def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        told = _attributes.get()
        if told is None or not _logger.isEnabledFor(logging.DEBUG):
            return await func(*args, **kwargs)
        started, end = time.perf_counter(), "failed"
        try:
            result = await func(*args, **kwargs)
            end = "ended"
            return result
        finally:
            seconds = time.perf_counter() - started
            _logger.debug("%s %s after %.3f s", func.__qualname__, end, seconds, extra={"rollout": told})

    return traced
