"""A served turn reaches a collector over OTLP; one that is silent delays neither turns nor the stop."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.collector import collecting
from tests.e2e.processes import Process, server_process
from tests.support import user

FLAGS = ("--engine", "scripted", "--engine-arg", "play=agent")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def turn(server: Process) -> str:
    """Run a turn within a client's trace; return its id."""
    body = {"model": "m", "messages": [user("hi")], "max_tokens": 8}
    reply = httpx.post(f"{server.url}/s/v1/chat/completions", json=body, headers={"traceparent": TRACEPARENT})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def test_a_collector_gets_the_trace_of_a_turn_by_the_time_the_server_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "rollouts")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # the stop exports them
        with server_process(tmp_path, *FLAGS) as server:
            interaction = turn(server)
            server.terminate()
            assert server.wait() == 0, server.output
        assert "Traceback" not in server.output
        *children, root = collector.spans
        assert [span.name for span in children] == ["match", "render", "queue", "generate", "commit"]
        assert root.name == "POST /v1/chat/completions"
        assert {span.trace_id.hex() for span in collector.spans} == {TRACEPARENT.split("-")[1]}
        assert root.parent_span_id.hex() == TRACEPARENT.split("-")[2]
        assert {span.parent_span_id for span in children} == {root.span_id}
        texts = {pair.key: pair.value.string_value for pair in root.attributes}
        assert texts["gen_ai.response.id"] == interaction
        (resource,) = collector.resources
        assert (resource["service.name"], resource["deployment.environment.name"]) == ("rollouts", "lab")


def test_a_collector_that_never_answers_does_not_keep_the_server_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(answers=False) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")  # far longer than `wait` waits
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        with server_process(tmp_path, *FLAGS) as server:
            turn(server)
            assert collector.reached.wait(60)
            turn(server)
            server.terminate()
            assert server.wait() == 0, server.output
        assert "the last traces were not exported" in server.output
