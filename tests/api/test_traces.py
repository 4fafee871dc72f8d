"""Traces of turns through the whole server: one span a request, its phases below, the client's trace continued."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import proxy.turns.turns
from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.engines.wire import LiveWire
from tests.support import call_text, function_tool, sampled, says, serving, until, user
from tests.wide import CROSSED
from tests.workers import workers_of
from tokengrove.spans import Tracing

PHASES = ["match", "render", "queue", "generate", "commit"]
SECRET = "words-that-only-messages-have"
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [user(SECRET)], "max_tokens": 99},
    "responses": {"input": SECRET, "max_output_tokens": 99},
    "messages": {"messages": [user(SECRET)], "max_tokens": 99},
}
CHAT = "/s/v1/chat/completions"
BODY = {"model": "m", "messages": [user(SECRET)]}
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "monitoring.md"
SOURCES = "".join(path.read_text() for path in (ROOT / "proxy").rglob("*.py"))
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@dataclass
class Exported:
    """What servers of the test exported, by the time that they have stopped."""

    exporters: list[InMemorySpanExporter] = field(default_factory=list)

    def tracing(self, tell: bool) -> Tracing:
        self.exporters.append(InMemorySpanExporter())
        return Tracing(self.exporters[-1])

    def spans(self) -> list[ReadableSpan]:
        return [span for exporter in self.exporters for span in exporter.get_finished_spans()]

    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.kind is SpanKind.SERVER]

    def below(self, root: ReadableSpan) -> list[ReadableSpan]:
        own = [span for span in self.spans() if span.parent is not None and span.parent.span_id == root.context.span_id]
        return sorted(own, key=lambda span: (span.start_time or 0, span.end_time or 0))

    def tree(self) -> list[tuple[str, list[str]]]:
        return [(root.name, [span.name for span in self.below(root)]) for root in self.roots()]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    """Let each server of the test trace into memory."""
    found = Exported()
    monkeypatch.setattr("proxy.app.start_tracing", found.tracing)
    yield found


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", BODIES)
async def test_a_turn_of_each_api_is_a_trace(tmp_path: Path, exported: Exported, api: str, stream: bool) -> None:
    async with serving(tmp_path, says("hello there")) as server:
        body = {"model": "asked-for", "stream": stream, **BODIES[api]}
        response = await server.post(f"/s/v1/{api}", body, headers={"traceparent": TRACEPARENT})
        assert response.status_code == 200
        (turn,) = await server.tree()
    assert exported.tree() == [(f"POST /v1/{api}", PHASES)]
    (root,) = exported.roots()
    before = root.start_time or 0
    for span in exported.below(root):
        assert before <= (span.start_time or 0) <= (span.end_time or 0) <= (root.end_time or 0)
        before = span.end_time or 0
        assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None and f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.status.status_code is StatusCode.UNSET
    attributes = said(root)
    expected = {
        "http.request.method": "POST",
        "http.route": f"/v1/{api}",
        "http.response.status_code": 200,
        "url.path": f"/s/v1/{api}",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokengrove",
        "gen_ai.request.model": "asked-for",
        "gen_ai.request.stream": stream,
        "gen_ai.response.id": turn["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": turn["prompt_tokens"],
        "gen_ai.usage.output_tokens": turn["output_tokens"],
        "gen_ai.conversation.id": "s",
        "tokengrove.session.id": "s",
        "tokengrove.interaction.id": turn["id"],
        "tokengrove.reason": turn["reason"],
        "tokengrove.status": "complete",
        "tokengrove.weight_version": 0,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert ("gen_ai.response.time_to_first_chunk" in attributes) is stream
    generated = said(exported.below(root)[3])
    assert generated["gen_ai.usage.output_tokens"] == turn["output_tokens"]
    assert [event.name for event in exported.below(root)[3].events] == ["first_token"]


async def test_no_span_holds_text_of_messages_or_a_secret(tmp_path: Path, exported: Exported) -> None:
    answer = "an-answer-of-the-model"
    async with serving(tmp_path, says(answer, call_text("f", f'{{"a": "{answer}"}}'), answer), admin_key="k") as server:
        admin = {"authorization": "Bearer k"}
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers=admin)
        path = started["base_url"].removeprefix("http://t")
        tool = function_tool(SECRET, {SECRET: {"type": "string"}})
        await server.ok(f"{path}/chat/completions", BODY)
        await server.ok(f"{path}/chat/completions", {**BODY, "tools": [tool], "stop": [SECRET], "user": SECRET})
        refused = {**BODY, "messages": [{"role": SECRET, "content": SECRET}]}
        assert (await server.post(f"{path}/chat/completions", refused)).status_code == 400
        for address, status in ((f"/~{started['api_key']}", 200), (f"/~x/{SECRET}/v1", 401), (f"/~x/{SECRET}", 401)):
            assert (await server.post(f"{address}/chat/completions", BODY)).status_code == status
    assert len(exported.roots()) == 6
    everything = "".join(span.to_json() for span in exported.spans())
    assert SECRET not in everything and answer not in everything
    secret = path.partition("~")[2].partition("/")[0]
    assert secret and secret not in everything and started["api_key"] not in everything


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, {"model": "m"}, 400, "invalid_request"),
        (CHAT, {**BODY, "max_tokens": -1}, 400, "invalid_request"),
        ("/s/v1/generate", {"input_ids": [10**8]}, 400, "invalid_request"),
        ("/s/v1/responses", {"input": "hi", "previous_response_id": "resp_x"}, 404, "previous_response_not_found"),
    ],
)
async def test_a_refused_request_is_an_error_with_its_code(
    tmp_path: Path, exported: Exported, path: str, body: Any, status: int, code: str
) -> None:
    async with serving(tmp_path, says()) as server:
        assert (await server.post(path, body)).status_code == status
    (root,) = exported.roots()
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, code)
    assert (said(root)["http.response.status_code"], said(root)["error.type"]) == (status, code)
    assert not {"generate", "commit"} & {span.name for span in exported.below(root)}


async def test_a_request_without_a_key_is_refused_in_a_trace(tmp_path: Path, exported: Exported) -> None:
    async with serving(tmp_path, says(), admin_key="k") as server:
        assert (await server.post(CHAT, BODY)).status_code == 401
    (root,) = exported.roots()
    assert said(root)["error.type"] == "invalid_api_key" and exported.below(root) == []


async def test_a_request_that_waits_too_long_for_the_engine_was_only_queued(tmp_path: Path, exported: Exported) -> None:
    async with serving(tmp_path, says(), pause_timeout_s=0.05) as server:
        await server.ok("/engine/pause_generation", {})
        assert (await server.post(CHAT, BODY)).status_code == 503
    (root,) = exported.roots()
    (queue,) = exported.below(root)
    assert queue.name == "queue" and queue.status.status_code is StatusCode.ERROR
    assert said(root)["error.type"] == "engine_unavailable"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_fails_is_an_error_in_its_generation(
    tmp_path: Path, exported: Exported, stream: bool
) -> None:
    reply = Reply(sampled("one two three"), fault=Fault.ERROR, fault_after=2)
    async with serving(tmp_path, play([reply])) as server:
        response = await server.post(CHAT, {**BODY, "stream": stream})
        assert response.status_code == (200 if stream else 502)
    (root,) = exported.roots()
    assert said(root)["http.response.status_code"] == response.status_code
    assert (said(root)["error.type"], said(root)["tokengrove.status"]) == ("engine_failed", "failed")
    *earlier, generate = exported.below(root)
    assert [span.name for span in earlier] == PHASES[:3]
    assert generate.status.status_code is StatusCode.ERROR and root.status.status_code is StatusCode.ERROR
    assert {span.status.status_code for span in earlier} == {StatusCode.UNSET}


async def test_a_turn_whose_client_left_is_traced_to_its_end(
    tmp_path: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.0)
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=30.0)])) as server:
        request = asyncio.create_task(server.post(CHAT, BODY))
        await until(lambda: len(server.engine.requests) == 1)
        request.cancel()  # over ASGI, cancelling is a disconnect
        await until(lambda: not server.app.state.turns.running.busy)
    (root,) = exported.roots()
    assert (said(root)["error.type"], said(root)["tokengrove.status"]) == ("client_left", "aborted")
    *_, generate = exported.below(root)
    assert generate.name == "generate" and (generate.end_time or 0) <= (root.end_time or 0)


async def test_a_retry_that_attaches_refers_to_the_trace_of_the_turn(tmp_path: Path, exported: Exported) -> None:
    headers = {"idempotency-key": "k"}
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=0.03)])) as server:
        first = asyncio.create_task(server.post(CHAT, BODY, headers=headers))
        await until(lambda: len(server.engine.requests) == 1)
        await asyncio.gather(first, server.post(CHAT, BODY, headers=headers))
        replayed = await server.post(CHAT, BODY, headers=headers)
        assert replayed.json() == first.result().json()
    turn, attached, again = sorted(exported.roots(), key=lambda root: root.start_time or 0)
    assert [span.name for span in exported.below(turn)] == PHASES
    for root, event in ((attached, "attached"), (again, "replayed")):
        assert [event.name for event in root.events] == [event]
        assert not {"generate", "commit"} & {span.name for span in exported.below(root)}
        assert said(root)["gen_ai.response.id"] == said(turn)["gen_ai.response.id"]
    assert [link.context.span_id for link in attached.links] == [turn.context.span_id]


async def test_a_turn_that_a_pause_interrupts_is_submitted_again_in_its_generation(
    tmp_path: Path, exported: Exported
) -> None:
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=0.03)] * 2)) as server:
        turn = asyncio.create_task(server.chat([user("hi")]))
        await until(lambda: bool(server.engine.requests))
        await server.ok("/engine/pause_generation", {"mode": "abort"})
        await server.ok("/engine/continue_generation", {})
        await turn
    (root,) = exported.roots()
    assert "submitted_again" in [event.name for event in exported.below(root)[3].events]


async def test_each_choice_has_a_generation_and_a_commit(tmp_path: Path, exported: Exported) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.chat([user("hi")], n=2)
    (root,) = exported.roots()
    names = [span.name for span in exported.below(root)]
    assert {name: names.count(name) for name in PHASES} == dict(zip(PHASES, (1, 1, 2, 2, 2), strict=True))
    ids = {said(span)["tokengrove.interaction.id"] for span in exported.below(root) if span.name == "generate"}
    assert ids == {said(root)["gen_ai.response.id"], said(root)["gen_ai.response.id"] + ".1"}
    assert said(root)["gen_ai.request.choice.count"] == 2
    assert said(root)["gen_ai.response.finish_reasons"] == ("stop", "stop")


async def test_token_ids_without_a_session_are_a_trace_with_a_generation(tmp_path: Path, exported: Exported) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.ok("/v1/generate", {"input_ids": [1, 2, 3]})
    assert exported.tree() == [("POST /v1/generate", ["generate"])]


async def test_a_server_without_the_package_says_so_once_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delitem(sys.modules, "tokengrove.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    async with serving(tmp_path, says("hello")) as server:
        await server.chat([user("hi")])
    (line,) = [message for message in caplog.messages if "OTEL_" in message]
    assert "pip install 'tokengrove[otel]'" in line


async def test_the_docs_name_every_span_event_and_attribute(
    tmp_path: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = play(
        [
            Reply(sampled("<think>\nhm\n</think>\n\nhi")),
            Reply(sampled("one two"), delay_s=0.03),
            *[Reply(sampled("a"))] * 3,
        ]
    )
    async with serving(tmp_path, script) as server:
        labels = {"project": "p", "experiment": "e", "step": 1, "sample_index": 2, "rollout_n": 3, "validate": True}
        await server.ok("/rl/start_session", {"session_id": "s", "metadata": labels})
        reply = await server.chat([user("hi")], stream=False)
        plain = server.engine.generate

        async def cached(request: Any) -> Any:
            async for chunk in plain(request):
                yield replace(chunk, cached_tokens=7)

        server.engine.generate = cached  # type: ignore[method-assign]
        history = [user("hi"), reply["choices"][0]["message"], user("and")]
        retry = {"idempotency-key": "k"}
        body = {"model": "m", "messages": history, "stream": True}
        first = asyncio.create_task(server.post(CHAT, body, headers=retry))
        await until(lambda: len(server.engine.requests) == 2)
        await asyncio.gather(first, server.post(CHAT, body, headers=retry))
        await server.post(CHAT, body, headers=retry)
        await server.chat([user("hi")], n=2)
        await server.post(CHAT, {})
    traces = PAGE.read_text().partition("## Traces")[2].partition("\n## ")[0]
    spans, events, attributes = (
        {name for row in re.findall(r"^\| (`[^|]+) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)}
        for table in re.split(r"\n\| (?:span|event|attribute) \|", traces)[1:4]
    )
    finished = exported.spans()
    assert {span.name for span in finished} == spans
    assert {name for span in finished for name in said(span)} == attributes
    assert {event.name for span in finished for event in span.events} <= events
    assert events == {"first_token", "attached", "replayed", *re.findall(r'\.note\("(\w+)"', SOURCES)}


async def test_the_lines_of_requests_name_their_traces(
    tmp_path: Path, exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, says("hello")) as server:
        with caplog.at_level("INFO", "proxy.api"):
            await server.post(CHAT, BODY, headers={"traceparent": TRACEPARENT})
            await server.post(CHAT, {})
            await server.post("/nowhere", {})
    told = [(record.msg, record.args["trace_id"]) for record in caplog.records if isinstance(record.args, dict)]
    ids = [f"{root.context.trace_id:032x}" for root in exported.roots()]
    assert told == [("turn", TRACE_ID), ("refused", ids[1]), ("refused", None)]
    assert ids[0] == TRACE_ID != ids[1]


async def test_workers_and_engine_servers_share_the_trace_of_a_turn(
    tmp_path: Path, exported: Exported, postgres_url: str
) -> None:
    """A retry that another worker passes on has one span, of the worker that answers it."""
    wire = LiveWire(delay_s=0.005)
    await wire.start()
    async with workers_of(tmp_path, postgres_url, engine=wire.url) as workers:
        body, headers = {**BODY, "max_tokens": 60}, {"idempotency-key": "k", "traceparent": TRACEPARENT}
        first = asyncio.create_task(workers[0].post(CHAT, body, headers=headers))
        await until(lambda: len(wire.wire.engine.running) == 1)
        retried = await workers[1].post(CHAT, body, headers=headers)
        assert retried.json() == (await first).json()
    sent = wire.wire.headers[-1]["traceparent"].split("-")
    await wire.kill()
    turn, attached = sorted(exported.roots(), key=lambda root: root.start_time or 0)
    assert [event.name for event in attached.events] == ["attached"]
    (generate,) = [span for span in exported.spans() if span.name == "generate"]
    assert generate.parent is not None and generate.parent.span_id == turn.context.span_id
    assert sent[1:3] == [TRACE_ID, f"{generate.context.span_id:016x}"]


async def test_requests_that_are_no_turns_have_no_spans(tmp_path: Path, exported: Exported) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.http.get("/health")
        await server.http.get("/metrics")
        await server.post("/nowhere", {})
        await server.ok("/v1/messages/count_tokens", BODY)
    assert exported.roots() == []
