"""One server for all clients. Connections to other machines are refused.

With `--keep-sessions=FOLDER` each session that `Served.keep` is called for is also written as a file, which the fast
tests replay: `pytest tests/conformance/test_loops.py --keep-sessions=tests/golden/clients` writes them anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.npm import Install, installer
from tests.conformance.recorder import recording
from tests.conformance.served import MODEL, Capture, Served
from tests.e2e.processes import ROOT, server_process

# The packages read these variables on import: no telemetry, no price lists, no proxies.
QUIET = {
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "AGNO_TELEMETRY": "false",
    "CAMEL_TELEMETRY_DISABLED": "true",
    "OTEL_SDK_DISABLED": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
os.environ.update(QUIET)
BUILD = """
import pathlib, sys
from proxy.engine.tiny.vision import build_tiny_vision_model
build_tiny_vision_model(pathlib.Path(sys.argv[1]))
"""
"""The clients' environment may lack the packages that make a model."""
_LOCAL = ("127.", "::1", "localhost", "0.0.0.0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-sessions", metavar="FOLDER", type=Path, help="write what clients send as files in this folder"
    )


@pytest.fixture(scope="session", params=["0", "1"], ids=["plain", "thinking"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model calls tools, writes JSON and answers; once without and once with reasoning."""
    folder = tmp_path_factory.mktemp("served")
    flags = ["--engine", "scripted", "--engine-arg", "play=agent", "--engine-arg", f"think={request.param}"]
    flags += ["--served-model-name", MODEL]
    with server_process(folder, *flags) as process:
        yield Served(process.url.rstrip("/"))


@pytest.fixture(scope="session")
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model follows the plan of the user's message."""
    capture: Path | None = request.config.getoption("--keep-sessions")
    flags = ["--engine", "tests.conformance.planned:PlannedEngine", "--served-model-name", MODEL]
    if capture is not None:
        flags += ["--engine-arg", "chunk=1000"]  # shorter files
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(server_process(tmp_path_factory.mktemp("planned"), *flags)).url.rstrip("/")
        if capture is None:
            yield Served(url)
        else:
            recorder = stack.enter_context(recording(url))
            yield Served(recorder.url, Capture(capture, recorder))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As `planned`, with a vision model."""
    model = tmp_path_factory.mktemp("model")
    python = os.environ.get("TOKENGROVE_TEST_SERVER_PYTHON", sys.executable)
    subprocess.run([python, "-c", BUILD, str(model)], check=True, cwd=ROOT)
    flags = ["--model", str(model), "--engine", "tests.conformance.planned:PlannedEngine", "--served-model-name", MODEL]
    with server_process(tmp_path_factory.mktemp("seeing"), *flags) as process:
        yield Served(process.url.rstrip("/"))


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Installs programs of npm, once for all tests."""
    return installer(tmp_path_factory.mktemp)


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make connections to other machines and look-ups of their names fail at once."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOCAL):
            raise OSError(f"a test must not connect to {address[0]}")
        connect(self, address)

    def guarded_look_up(host: Any, *more: Any, **options: Any) -> Any:
        if host is not None and not str(host).startswith(_LOCAL):
            raise OSError(f"a test must not look up {host}")
        return look_up(host, *more, **options)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
