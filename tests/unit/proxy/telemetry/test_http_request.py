"""Whatever goes wrong with what is told of a request, the request itself goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from proxy.telemetry.http_request import HttpRequest


class BrokenTracing:
    """Makes no traces."""

    def begin(self, *_: object) -> Any:
        raise ValueError("a sampler that fails")


def scope() -> dict[str, Any]:
    return {"method": "POST", "path": "/v1/chat/completions", "scheme": "http", "headers": []}


def test_a_request_whose_end_cannot_be_told_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    told: list[HttpRequest] = []

    def tell(request: HttpRequest) -> None:
        told.append(request)
        raise ValueError("a metric that fails")

    asked = scope()
    request = HttpRequest(asked, tell)
    with caplog.at_level(logging.ERROR):
        request.end(asked)
        request.end(asked)
    assert told == [request]
    assert caplog.messages == ["the end of a request could not be told"]


def test_a_request_whose_trace_cannot_be_begun_goes_on_without_one(caplog: pytest.LogCaptureFixture) -> None:
    asked = scope()
    request = HttpRequest(asked)
    request.begin_trace(BrokenTracing(), asked)  # type: ignore[arg-type]
    assert request.trace is None and request.trace_id is None
    assert caplog.messages == ["a trace could not be begun"]
