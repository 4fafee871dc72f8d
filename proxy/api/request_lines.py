"""The log line at the end of a request that was refused or is not a turn.

A client that sends the same wrong request in a loop does not fill a disk: only some equal refusals are logged each
second, and the others are counted.
"""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.telemetry.groups import HttpMetrics
from proxy.telemetry.http_request import HttpRequest
from proxy.telemetry.log_lines import without_texts

logger = logging.getLogger(__name__)

REFUSALS = 5
"""The most lines per second for refusals of one route with one code."""

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_COUNTING = frozenset(
    {
        *("/v1/messages/count_tokens", "/v1beta/models/{model}:countTokens"),
        *("/v1/responses/input_tokens", "/v1/tokenize", "/v1/detokenize", "/v1/parse"),
        *("/mailbox/next", "/mailbox/deliver"),
    }
)
"""Routes that change nothing, or that an environment calls for each turn. Their lines have the level DEBUG."""


class RequestLines:
    """Counts and logs each request that has ended. Use it on the event loop."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self._metrics = metrics
        self._said: dict[tuple[str, str], int] = {}

    def __call__(self, request: HttpRequest) -> None:
        self._metrics.count(request)
        if request.tell is not None:
            request.tell(request)
        elif request.code is not None:
            self._refused(request, request.code)
        else:
            _answered(request)

    def _refused(self, request: HttpRequest, code: str) -> None:
        status = request.status or 0
        level = logging.WARNING if status >= 500 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        kind = (request.route, code)
        said = self._said[kind] = self._said.get(kind, 0) + 1
        if said == 1:
            asyncio.get_running_loop().call_later(1.0, self._next_second, kind, level)
        if said <= REFUSALS:
            logger.log(
                level,
                "refused",
                {
                    "method": request.method,
                    "route": request.route,
                    "http_status": status,
                    "code": code,
                    "message": without_texts(request.message or ""),
                    "session": request.session,
                    **request.labels,
                    "client": None if request.client is None else "{}:{}".format(*request.client),
                    "total_s": time.monotonic() - request.started,
                    "request_id": request.id,
                    "trace_id": request.trace_id,
                },
            )

    def _next_second(self, kind: tuple[str, str], level: int) -> None:
        more = self._said.pop(kind) - REFUSALS
        if more > 0:
            logger.log(level, "refused more", {"route": kind[0], "code": kind[1], "requests": more})


def _answered(request: HttpRequest) -> None:
    level = logging.DEBUG if request.method in _READS or request.route in _COUNTING else logging.INFO
    logger.log(
        level,
        "request",
        {
            "method": request.method,
            "route": request.route,
            "http_status": request.status,
            "session": request.session,
            **request.labels,
            "client_left": request.left or None,
            "total_s": time.monotonic() - request.started,
            "request_id": request.id,
            "trace_id": request.trace_id,
        },
    )
