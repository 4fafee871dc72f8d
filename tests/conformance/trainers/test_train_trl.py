"""examples/train_trl.py, run as its users run it: the model learns the agent's task."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.engine.tiny.model import build_tiny_model
from tests.conformance.packages import package
from tests.e2e.processes import ROOT, server_process
from tokengrove.client import Client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(900)
def test_the_example_learns_the_task_of_its_agent(tmp_path: Path) -> None:
    package("trl")
    package("openai")
    model = tmp_path / "model"
    build_tiny_model(model, seed=0)
    flags = ["--model", str(model), "--engine", "transformers", "--engine-arg", "device=cpu"]
    with server_process(tmp_path, *flags) as server:
        example = [sys.executable, str(ROOT / "examples" / "train_trl.py"), "--url", server.url, "--model", str(model)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(example, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rewards = [float(found) for found in re.findall(r"mean reward (\d\.\d\d)", done.stdout)]
        assert sum(rewards[:5]) / 5 < 0.5
        assert min(rewards[-5:]) > 0.85
        with Client(server.url) as client:
            assert client.engine().version == len(rewards) + 1
            assert {session["status"] for session in client.sessions()} == {"ended"}
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"model", "served"}
