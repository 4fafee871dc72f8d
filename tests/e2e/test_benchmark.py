"""`python -m benchmarks`, as its README says, with this server and a load of a few sessions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_a_quick_run_finds_no_token_of_this_server_wrong_lost_or_trained_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--gateways", "tokengrove", "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert ran.stdout.strip() == (tmp_path / "results.md").read_text().strip()
    results = json.loads((tmp_path / "results.json").read_text())
    own, bare = (results["gateways"][name]["figures"] for name in ("tokengrove", "pass-through"))
    exact = own["exactness"]
    assert exact["exact"] == exact["sampled"] > 10_000
    assert not any(exact[name] for name in ("wrong", "lost", "twice", "moved", "unseen", "broken_turns"))
    shown = own["images"]
    assert shown["exact"] == shown["sampled"] > 1_000
    assert not any(shown[name] for name in ("wrong", "lost", "twice", "moved", "unseen", "broken_turns"))
    assert own["turns"]["failures"] == [] == own["kill"]["failures"]
    assert (own["kill"]["lost_answers"], own["kill"]["of_all"]["twice"], own["kill"]["of_all"]["wrong"]) == (0, 0, 0)
    assert bare["exactness"]["broken_turns"] == bare["exactness"]["continuing_turns"] > 100
    assert "no gateway" in ran.stdout and (tmp_path / "results.svg").read_text().startswith("<svg ")
