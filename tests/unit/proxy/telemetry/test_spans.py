"""The spans of a request: one for it, and one for each phase of its turns, in time and in the trace of its client."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from proxy.telemetry.spans import Trace, begin_trace
from proxy.telemetry.timeline import Timeline
from tokengrove import spans
from tokengrove.errors import EngineTimeout
from tokengrove.spans import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


class Collected:
    """A tracing whose spans can be read."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(self.exporter)

    def begin(self, *headers: tuple[bytes, bytes]) -> Trace:
        return begin_trace(self.tracing, "POST /v1/chat/completions", headers, time.monotonic(), {"http.route": "/v1"})

    async def spans(self) -> dict[str, ReadableSpan]:
        await self.tracing.close()
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest_asyncio.fixture
async def collected() -> AsyncIterator[Collected]:
    collected = Collected()
    yield collected
    await collected.tracing.close()


def passed(**more: float | None) -> Timeline:
    """The timeline of a turn that has passed all its phases just now."""
    now, timeline = time.monotonic(), Timeline()
    names = ("begun", "matched", "rendered", "admitted", "first_token", "sampled", "commit_begun", "committed", "ended")
    for number, name in enumerate(names):
        setattr(timeline, name, now + number / 1e6)
    for name, moment in more.items():
        setattr(timeline, name, moment)
    return timeline


def done(error: Exception | None = None) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()
    return future


def nothing() -> Mapping[str, Any]:
    return {}


async def test_a_request_has_a_span_with_one_below_it_for_each_phase(collected: Collected) -> None:
    trace = collected.begin()
    trace.add_turn("t", passed(), done(), lambda: {"generate": {"gen_ai.usage.output_tokens": 3}})
    trace.end(None, {"http.response.status_code": 200})
    found = await collected.spans()
    root = found.pop("POST /v1/chat/completions")
    assert list(found) == ["match", "render", "queue", "generate", "commit"]
    assert (root.kind, root.parent, root.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert dict(root.attributes or {}) == {"http.route": "/v1", "http.response.status_code": 200}
    before = root.start_time or 0
    for span in found.values():
        assert span.parent is not None and span.parent.span_id == trace.context.span_id
        assert before <= (span.start_time or 0) <= (span.end_time or 0) <= (root.end_time or 0)
        before = span.end_time or 0
    assert dict(found["generate"].attributes or {}) == {"gen_ai.usage.output_tokens": 3}
    assert [event.name for event in found["generate"].events] == ["first_token"]


async def test_the_trace_of_the_client_is_continued(collected: Collected) -> None:
    trace = collected.begin((b"traceparent", PARENT.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2"))
    trace.end(None, {})
    (root,) = (await collected.spans()).values()
    assert trace.context.hex_id == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent is not None and root.parent.span_id == 0xB7AD6B7169203331
    assert trace.context.state == "a=1,b=2"


@pytest.mark.parametrize("header", [b"nonsense", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", b"\xff" * 700])
async def test_a_malformed_context_begins_a_new_trace(collected: Collected, header: bytes) -> None:
    trace = collected.begin((b"traceparent", header))
    trace.end(None, {})
    (root,) = (await collected.spans()).values()
    assert root.parent is None


async def test_what_the_client_does_not_sample_is_not_exported_but_passed_on(collected: Collected) -> None:
    trace = collected.begin((b"traceparent", UNSAMPLED.encode()))
    trace.add_turn("t", passed(), done(), nothing)
    assert trace.context.headers("t")["traceparent"].endswith("-00")
    trace.end(None, {})
    assert await collected.spans() == {}


async def test_engine_servers_are_told_the_id_of_the_generation(collected: Collected) -> None:
    trace = collected.begin((b"traceparent", PARENT.encode()), (b"tracestate", b"a=1"))
    headers = trace.context.headers("t")
    assert headers == trace.context.headers("t")  # submitted again
    other = trace.context.headers("other")
    for name in ("t", "other"):
        trace.add_turn(name, passed(), done(), nothing)
    trace.end(None, {})
    await collected.tracing.close()
    generated = [span for span in collected.exporter.get_finished_spans() if span.name == "generate"]
    ids = [f"{span.context.span_id:016x}" for span in generated if span.context is not None]
    assert [headers["traceparent"].split("-")[2], other["traceparent"].split("-")[2]] == ids
    assert headers["traceparent"].split("-")[1] == trace.context.hex_id
    assert headers["tracestate"] == "a=1"


async def test_choices_share_the_spans_of_the_phases_that_they_share(collected: Collected) -> None:
    trace, first = collected.begin(), passed()
    second = passed(begun=first.begun, matched=first.matched, rendered=first.rendered)
    for timeline in (first, second):
        trace.add_turn("t", timeline, done(), nothing)
    trace.end(None, {})
    await collected.tracing.close()
    names = [span.name for span in collected.exporter.get_finished_spans()]
    assert names == ["match", "render", "queue", "generate", "commit", "queue", "generate", "commit", names[-1]]


async def test_a_failed_turn_marks_its_last_phase_and_the_request(collected: Collected) -> None:
    trace = collected.begin()
    failed = passed(sampled=None, commit_begun=None, committed=None)
    failed.failed = failed.ended
    trace.add_turn("t", failed, done(EngineTimeout("no token")), nothing)
    trace.end(None, {"http.response.status_code": 200})  # a stream had begun
    found = await collected.spans()
    assert list(found)[:-1] == ["match", "render", "queue", "generate"]
    for name, span in found.items():
        expected = (StatusCode.ERROR, "timeout") if name in ("generate", list(found)[-1]) else (StatusCode.UNSET, None)
        assert (span.status.status_code, (span.attributes or {}).get("error.type")) == expected


async def test_a_refused_request_has_the_phase_in_which_it_was_refused(collected: Collected) -> None:
    trace = collected.begin()
    trace.timeline = passed(held=time.monotonic(), let_in=None, matched=None, rendered=None, admitted=None)
    trace.timeline.sampled = trace.timeline.commit_begun = trace.timeline.ended = None
    trace.end("engine_unavailable", {"http.response.status_code": 503})
    found = await collected.spans()
    assert list(found) == ["queue", "POST /v1/chat/completions"]
    assert all(span.status.status_code is StatusCode.ERROR for span in found.values())


async def test_events_are_those_of_the_phase_in_which_they_happened(collected: Collected) -> None:
    trace, timeline = collected.begin(), passed()
    timeline.note("engine_lost", reason="gone")
    timeline.sampled = timeline.commit_begun = timeline.committed = timeline.ended = time.monotonic()
    trace.add_turn("t", timeline, done(), nothing)
    trace.end(None, {})
    found = await collected.spans()
    assert [event.name for event in found["generate"].events] == ["engine_lost", "first_token"]
    assert not found["POST /v1/chat/completions"].events


async def test_a_retry_refers_to_the_trace_of_the_request_that_it_repeats(collected: Collected) -> None:
    first, retry = collected.begin(), collected.begin()
    retry.link(first.context)
    retry.timeline, retry.begun = Timeline(), True
    retry.timeline.note("attached")
    retry.end(None, {})
    (root,) = (await collected.spans()).values()
    assert [link.context.span_id for link in root.links] == [first.context.span_id]
    assert [event.name for event in root.events] == ["attached"]


async def test_spans_are_made_once_a_turn_without_a_client_has_ended(collected: Collected) -> None:
    trace, ended = collected.begin(), asyncio.get_running_loop().create_future()
    timeline = passed()
    trace.add_turn("t", timeline, ended, nothing)
    trace.end("client_left", {})
    await asyncio.sleep(0)
    timeline.ended = time.monotonic()
    ended.set_result(None)
    await asyncio.sleep(0)
    found = await collected.spans()
    root = found["POST /v1/chat/completions"]
    assert len(found) == 6 and (root.end_time or 0) >= (found["commit"].end_time or 0)
    assert root.status.status_code is StatusCode.ERROR


class Refusing(SpanExporter):
    """Fails each export, as the SDK's exporter of a collector that is away."""

    def __init__(self) -> None:
        self.exports = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.exports += 1
        logging.getLogger("opentelemetry.exporter.otlp").error("Failed to export %d", self.exports)
        return SpanExportResult.FAILURE


async def test_errors_of_the_exporter_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Refusing()
    tracing = Tracing(exporter)
    for _ in range(5):
        begin_trace(tracing, "r", [], time.monotonic(), {}).end(None, {})
        tracing._provider.force_flush()
    assert exporter.exports == 5
    assert caplog.messages == ["traces: Failed to export 1"]
    later = time.monotonic() + 61
    monkeypatch.setattr(spans.time, "monotonic", lambda: later)
    logging.getLogger("opentelemetry").warning("Queue full")
    assert caplog.messages[1:] == ["traces: Queue full (4 lines like this were left out)"]
    monkeypatch.undo()
    await tracing.close()
    logging.getLogger("opentelemetry").warning("after the end")
    assert caplog.messages[-1] == "after the end"


def join_the_rest() -> None:
    """Wait for the threads that a close has not waited for."""
    for thread in threading.enumerate():
        if thread.name == "tokengrove-traces":
            thread.join(60)


class Hanging(SpanExporter):
    """Takes an export and does not return, as for a collector that does not answer."""

    def __init__(self) -> None:
        self.began = self.shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began = True
        while not self.shut:
            time.sleep(0.001)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.shut = True


async def test_a_collector_that_does_not_answer_ends_neither_the_wait_nor_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "FLUSH_S", 0.01)
    exporter = Hanging()
    tracing = Tracing(exporter)
    begin_trace(tracing, "r", [], time.monotonic(), {}).end(None, {})
    await tracing.close()
    join_the_rest()
    assert exporter.began and exporter.shut
    assert any("were not exported" in message for message in caplog.messages)


async def test_a_collector_that_is_away_is_one_line_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "FLUSH_S", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces"
    tracing = Tracing(OTLPSpanExporter(endpoint=away))
    for _ in range(3):
        begin_trace(tracing, "r", [], time.monotonic(), {}).end(None, {})
    await tracing.close()
    join_the_rest()
    first, last = caplog.messages
    assert first.startswith("traces: ") and "Connection refused" in first
    assert "were not exported" in last


async def test_the_service_is_called_tokengrove_unless_the_environment_names_it(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.name=one")
    named = Collected()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "two")
    renamed = Collected()
    found = []
    for each in (collected, named, renamed):
        each.begin().end(None, {})
        (root,) = (await each.spans()).values()
        found.append(root.resource.attributes["service.name"])
    assert found == ["tokengrove", "one", "two"]


async def test_the_sampler_of_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    off = Collected()
    off.begin().end(None, {})
    assert await off.spans() == {}
