"""ruff and mypy strict find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)])
def test_the_checker_finds_nothing(command: tuple[str, ...]) -> None:
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
