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


def test_an_event_is_cut_around_the_field_and_never_inside_of_a_string() -> None:
    event = sse.data({"model": '"text":null', "delta": {"text": None, "n": 1}})
    assert b"1".join(sse.cut(event, "text")) == sse.data({"model": '"text":null', "delta": {"text": 1, "n": 1}})
