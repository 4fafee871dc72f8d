"""Server-sent events as bytes."""

from __future__ import annotations

from proxy.protocols import sse


def test_a_keepalive_is_one_comment_line_and_no_empty_event() -> None:
    assert sse.KEEPALIVE.startswith(b":")
    assert sse.KEEPALIVE.count(b"\n") == 1
    assert sse.KEEPALIVE.endswith(b"\n")


def test_events_end_with_an_empty_line() -> None:
    assert sse.data({"a": 1}) == b'data: {"a":1}\n\n'
    assert sse.event("ping", {}) == b"event: ping\ndata: {}\n\n"
