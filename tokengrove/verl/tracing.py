"""Times and traces of loops: OpenTelemetry spans, and log records of level debug with the sample.

Spans are made if OpenTelemetry's environment variables or a provider of the program enable tracing. They contain no
text of samples unless `token2text` is true.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tokengrove import tracing

_logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_SPAN = "tokengrove."


@dataclass(frozen=True, slots=True)
class _Traced:
    """The running sample. `told` identifies it in the log, `attributes` in spans; None: no spans."""

    told: dict[str, Any]
    attributes: dict[str, Any] | None
    token2text: bool


_traced: ContextVar[_Traced | None] = ContextVar("rollout_traced", default=None)


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
    *,
    spans: bool = True,
    token2text: bool = False,
    project: str | None = None,
    experiment: str | None = None,
) -> Iterator[None]:
    """Trace a sample in the block with a span `name`; calls of `rollout_trace_op` inside become child spans.

    With `trace` false neither spans nor log records are made, with `spans` false only log records. `token2text`: spans
    contain the text of prompts and responses.
    """
    if not trace:
        with _being(None):
            yield
        return
    told = {"name": name, "step": step, "sample_index": sample_index, "rollout_n": rollout_n, "validate": validate}
    about = {**told, "project": project, "experiment": experiment}
    attributes = {f"{_SPAN}{key}": _plain(value) for key, value in about.items() if key != "name"}
    with _being(_Traced(told, attributes if spans else None, token2text)):
        if not spans:
            yield
            return
        with tracing.span(name, attributes):
            yield


@contextmanager
def _being(traced: _Traced | None) -> Iterator[None]:
    token = _traced.set(traced)
    try:
        yield
    finally:
        _traced.reset(token)


def rollout_trace_op(func: Callable[_P, Coroutine[Any, Any, _R]]) -> Callable[_P, Coroutine[Any, Any, _R]]:
    """Make each call of an asynchronous method a span within `rollout_trace_attr`, named after the method, and log its
    duration and how it ended.

    Spans have no tokens: the server records every call of the model in the session.
    """

    @functools.wraps(func)
    async def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        sample = _traced.get()
        if sample is None:
            return await func(*args, **kwargs)
        started, end = time.perf_counter(), "failed"
        try:
            result = await _in_span(sample, func, *args, **kwargs)
            end = "ended"
            return result
        finally:
            seconds = time.perf_counter() - started
            _logger.debug("%s %s after %.3f s", func.__qualname__, end, seconds, extra={"rollout": sample.told})

    return traced


def traceparent() -> str | None:
    """The `traceparent` of the current span, by which the server's spans join the trace; None without spans."""
    sample = _traced.get()
    return None if sample is None or sample.attributes is None else tracing.traceparent()


async def _in_span(
    sample: _Traced, func: Callable[_P, Coroutine[Any, Any, _R]], *args: _P.args, **kwargs: _P.kwargs
) -> _R:
    if sample.attributes is None:
        return await func(*args, **kwargs)
    with tracing.span(func.__qualname__, sample.attributes) as span:
        result = await func(*args, **kwargs)
        if span is not None:
            span.set_attributes(await _described(result, args[0] if args else None, sample.token2text))
        return result


async def _described(result: Any, owner: Any, token2text: bool) -> dict[str, Any]:
    """The attributes for the numbers of `prompt_ids` and `response_ids`, and with `token2text` their text."""
    found: dict[str, Any] = {}
    decode = getattr(getattr(owner, "tokenizer", None), "decode", None)
    for part in ("prompt", "response"):
        ids = getattr(result, f"{part}_ids", None)
        if ids is None:
            continue
        found[f"{_SPAN}{part}_tokens"] = len(ids)
        if token2text and decode is not None:
            found[f"{_SPAN}{part}_text"] = str(await asyncio.to_thread(decode, list(ids)))
    return found


def _plain(value: Any) -> Any:
    """A value as a span attribute."""
    value = value.item() if hasattr(value, "item") else value
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
