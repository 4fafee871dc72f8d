"""Traces are made if the standard variables of OpenTelemetry ask for them, and only then is anything of it imported."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from tokengrove import tracing
from tokengrove.tracing import start_tracing, tracing_asked_for

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "rollouts", "OTEL_TRACES_SAMPLER": "always_on"}, None),
        ({"OTEL_TRACES_EXPORTER": ""}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "OTEL_TRACES_EXPORTER"),
        (ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, None),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ],
)
def test_the_standard_variables_turn_traces_on_and_off(environment: Mapping[str, str], asked: str | None) -> None:
    assert tracing_asked_for(environment) == asked


def test_nothing_of_opentelemetry_is_imported_without_its_variables() -> None:
    code = (
        "import sys; from proxy.app import build_app; from tokengrove.tracing import start_tracing;"
        "assert start_tracing({}) is None; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_missing_package_is_one_warning_that_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "tokengrove.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with caplog.at_level(logging.WARNING):
        assert start_tracing(ENDPOINT) is None
        assert start_tracing(ENDPOINT, tell=False) is None
    (line,) = caplog.messages
    assert line.startswith("OTEL_EXPORTER_OTLP_ENDPOINT is set, but there are no traces:")
    assert "pip install 'tokengrove[otel]'" in line


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'otlp_proto_grpc'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "'http/json'"),
    ],
)
def test_an_exporter_that_is_not_installed_is_one_warning(
    environment: Mapping[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert start_tracing(environment) is None
    (line,) = caplog.messages
    assert named in line and "console" in line


async def test_the_exporter_is_the_one_that_the_variables_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokengrove.tracing")
    kinds = {}
    for name, tell in (("otlp", True), ("console", False)):
        made = start_tracing({"OTEL_TRACES_EXPORTER": name}, tell=tell)
        assert made is not None
        kinds[name] = type(made._exporter)
        await made.close()
    assert kinds == {"otlp": OTLPSpanExporter, "console": ConsoleSpanExporter}
    assert caplog.messages == ["traces are on: OTEL_TRACES_EXPORTER is set"]
    assert tracing.start_tracing({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}) is None
