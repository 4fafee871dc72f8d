"""Metrics of HTTP requests: their number, their answers, and their duration."""

from __future__ import annotations

import time

from proxy.telemetry.families import Counts, Group, Histogram
from proxy.telemetry.http_request import HttpRequest

_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
_FAILURES = ("429", "500", "503")
"""Statuses that are shown with 0 for each route that was called, before they occur."""
_SECONDS = (0.005, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0)


class HttpMetrics(Group):
    """Counted at the end of each request."""

    def __init__(self) -> None:
        self.requests = Counts(
            "tokengrove_http_requests",
            "HTTP requests that ended, by method, route (the template of the path) and status.",
            *("method", "route", "status"),
        )
        self.errors = Counts("tokengrove_errors", "HTTP requests answered with an error, by its code.", "code")
        self.duration = Histogram(
            "tokengrove_http_request_seconds",
            "Seconds from the head of a request to the end of its answer, by route.",
            "route",
            bounds=_SECONDS,
        )

    def count(self, request: HttpRequest) -> None:
        """Count a request that has ended."""
        method = request.method if request.method in _METHODS else "other"
        route = method, request.route
        if (*route, _FAILURES[0]) not in self.requests.by:
            self.requests.expect((*route, status) for status in _FAILURES)
        self.requests.by[*route, str(request.status)] += 1
        if request.code is not None:
            self.errors.by[(request.code,)] += 1
        self.duration.observe(time.monotonic() - request.started, request.route)
