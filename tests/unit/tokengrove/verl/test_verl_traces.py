"""Spans of agent loops: one for a sample and one for each traced method, as `trace` and the variables say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.e2e.collector import collecting
from tests.support import real_server, says, serving, user
from tokengrove import tracing
from tokengrove.client import AsyncClient
from tokengrove.spans import Tracing
from tokengrove.verl import AgentLoopManager, rollout_trace_attr, rollout_trace_op

KEY = "the-admin-key"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("traces"), admin_key=KEY) as address:
        yield address


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of a program that has a provider of its own."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    return exporter


def configured(**trace: Any) -> dict[str, Any]:
    rollout = {"prompt_length": 64, "response_length": 8, "trace": trace}
    return {"actor_rollout_ref": {"rollout": rollout}, "trainer": {"project_name": "sums"}}


def played(url: str, config: dict[str, Any], samples: int = 1) -> None:
    batch = {"raw_prompt": [[user(f"hi {at}")] for at in range(samples)], "meta_info": {"global_steps": 3}}
    AgentLoopManager(config, url, admin_key=KEY).generate_sequences(batch)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_sample_is_a_span_and_each_traced_method_one_below(url: str, exported: InMemorySpanExporter) -> None:
    played(url, configured(backend="otel", experiment_name="first"))
    spans = by_name(exported)
    assert set(spans) == {"agent_loop", "SingleTurnAgentLoop.run", "AsyncLLMServerManager.generate"}
    loop, run, generate = spans["agent_loop"], spans["SingleTurnAgentLoop.run"], spans["AsyncLLMServerManager.generate"]
    assert loop.parent is None and run.parent is not None and generate.parent is not None
    assert (run.parent.span_id, generate.parent.span_id) == (loop.context.span_id, run.context.span_id)
    labels = {"project": "sums", "experiment": "first", "step": 3, "sample_index": 0, "rollout_n": 0, "validate": False}
    for span in spans.values():
        assert said(span).items() >= {f"tokengrove.{name}": value for name, value in labels.items()}.items()
    assert said(run)["tokengrove.response_tokens"] == 8 and said(run)["tokengrove.prompt_tokens"] > 0
    assert not [name for name in said(run) if name.endswith("_text")]


def test_token2text_writes_the_text_of_prompt_and_response(url: str, exported: InMemorySpanExporter) -> None:
    played(url, configured(backend="otel", token2text=True))
    told = said(by_name(exported)["SingleTurnAgentLoop.run"])
    assert "hi 0" in told["tokengrove.prompt_text"] and told["tokengrove.response_text"]


def test_so_many_samples_of_a_step_have_spans(url: str, exported: InMemorySpanExporter) -> None:
    config = configured(backend="otel", max_samples_per_step_per_worker=2)
    config["actor_rollout_ref"]["rollout"]["n"] = 2
    played(url, config, samples=4)
    roots = [span for span in exported.get_finished_spans() if span.parent is None]
    places = [(said(span)["tokengrove.sample_index"], said(span)["tokengrove.rollout_n"]) for span in roots]
    assert len(places) == 4 and len({index for index, _ in places}) == 2
    assert sorted(rollout for _, rollout in places) == [0, 0, 1, 1]


@pytest.mark.parametrize(("trace", "spans"), [({}, True), ({"backend": None}, False)])
def test_a_backend_that_is_null_turns_spans_off(
    url: str, exported: InMemorySpanExporter, trace: dict[str, Any], spans: bool
) -> None:
    played(url, configured(**trace))
    assert bool(exported.get_finished_spans()) is spans


async def test_the_spans_of_the_server_are_below_those_of_the_loop(
    tmp_path: Path, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_server = InMemorySpanExporter()
    monkeypatch.setattr("proxy.app.start_tracing", lambda tell: Tracing(of_server))
    prompts = {"raw_prompt": [[user("hi")]]}
    async with serving(tmp_path, says("one", "two")) as server, AsyncClient(app=server.app) as client:
        await AgentLoopManager(configured(backend="otel"), client).generate_sequences(prompts)
        await AgentLoopManager(configured(backend=None), client).generate_sequences(prompts)
    below = by_name(exported)["AsyncLLMServerManager.generate"].context
    first, second = [span for span in of_server.get_finished_spans() if span.name == "POST /v1/generate"]
    assert first.parent is not None and second.parent is None
    assert (first.context.trace_id, first.parent.span_id) == (below.trace_id, below.span_id)


async def test_a_method_that_raises_is_an_error_without_its_text(exported: InMemorySpanExporter) -> None:
    @rollout_trace_op
    async def fails() -> None:
        raise ValueError("words of a message")

    with pytest.raises(ValueError, match="words"), rollout_trace_attr(step=1, name="mine"):
        await fails()
    with pytest.raises(ValueError, match="words"), rollout_trace_attr(step=1, trace=False):
        await fails()
    spans = exported.get_finished_spans()
    assert [span.name.rpartition(".")[2] for span in spans] == ["fails", "mine"]
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    assert "words" not in "".join(span.to_json() for span in spans)


def test_spans_go_where_the_variables_say(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracing._own_tracing.cache_clear()
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                played(url, configured(backend="otel"))
            own = tracing._own_tracing()
            assert own is not None
            own._provider.shutdown()
            own._errors.remove()
        finally:
            tracing._own_tracing.cache_clear()
        assert {span.name for span in collector.spans} >= {"agent_loop", "AsyncLLMServerManager.generate"}
        assert collector.resources[0]["service.name"] == "tokengrove"


@pytest.mark.usefixtures("exported")
def test_a_backend_of_verls_is_told_that_spans_go_elsewhere() -> None:
    with pytest.warns(UserWarning, match="trace.backend='mlflow': spans are OpenTelemetry's"):
        AgentLoopManager(configured(backend="mlflow"), "http://127.0.0.1:1")


@pytest.mark.parametrize("backend", ["mlflow", "otel"])
def test_a_backend_without_traces_in_the_process_is_told_the_way_out(backend: str) -> None:
    with pytest.warns(UserWarning, match=f"trace.backend='{backend}' makes no spans.*OTEL_EXPORTER_OTLP_ENDPOINT"):
        AgentLoopManager(configured(backend=backend), "http://127.0.0.1:1")
