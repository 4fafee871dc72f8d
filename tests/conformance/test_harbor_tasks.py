"""Harbor's own reader takes the same task folders, and has the same values in their fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.packages import package
from tests.unit.tokengrove.rollout.harbor_tasks import task

pytestmark = pytest.mark.clients
FULL = """
version = "1.3"
artifacts = ["/app/out.txt", {source = "/app/logs", destination = "kept", exclude = ["*.tmp"]}]
multi_step_reward_strategy = "final"
[task]
name = "org/word"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 30
user = "agent"
[verifier]
timeout_sec = 40.5
env = {KEY = "${THE_KEY:-none}"}
[environment]
build_timeout_sec = 50
cpus = 2
memory = "4G"
storage_mb = 100
allow_internet = false
workdir = "/work"
os = "Linux"
env = {A = "b"}
[environment.healthcheck]
command = "true"
retries = 7
[solution]
env = {S = "s"}
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
verifier = {environment_mode = "separate", timeout_sec = 5}
"""
STEPS = {"steps/one/instruction.md": "<!-- canary x -->\n\nOne.", "steps/two/instruction.md": "Two."}
ROOT = Path(__file__).parents[2]
WITHOUT = {"destination": None, "exclude": [], "service": None}
OURS = """
import json, sys
from pathlib import Path
from tokengrove.rollout.harbor import BadTask, TaskFolder
try:
    task = TaskFolder(Path(sys.argv[1]))
except BadTask as error:
    print(json.dumps(str(error)))
else:
    instructions = [stage.instruction for stage in task.stages]
    print(json.dumps({"config": task.config.model_dump(mode="json"), "name": task.name, "instructions": instructions}))
"""


def ours(folder: Path) -> Any:
    python = os.environ.get("TOKENGROVE_TEST_SERVER_PYTHON", sys.executable)
    told = subprocess.run([python, "-c", OURS, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


def same(ours: Any, theirs: Any) -> None:
    """Compare what we read with what Harbor read; Harbor knows more fields."""
    if isinstance(ours, dict):
        for name, value in ours.items():
            same(value, theirs[name])
    elif isinstance(ours, list) and isinstance(theirs, list):
        for one, other in zip(ours, theirs, strict=True):
            same(one, {**WITHOUT, "source": other} if isinstance(one, dict) and isinstance(other, str) else other)
    else:
        assert ours == theirs or (not ours and not theirs)


@pytest.mark.parametrize(("config", "files"), [(FULL, STEPS), ("", {})], ids=["full", "empty"])
def test_the_fields_have_the_values_that_harbor_reads(tmp_path: Path, config: str, files: dict[str, str]) -> None:
    harbor = package("harbor.models.task.task")
    folder = task(tmp_path / "one", config, files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fields with older names
        theirs = harbor.Task(folder)
    read = ours(folder)
    same(read["config"], theirs.config.model_dump(mode="json"))
    assert read["name"] == theirs.name
    steps = [theirs.step_instruction(step.name) for step in theirs.config.steps or []]
    assert read["instructions"] == (steps or [theirs.instruction])


@pytest.mark.parametrize(
    "config",
    [
        "[agent]\ntimeout_sec = 'soon'",
        "[environment]\nos = 'plan9'",
        "[environment]\nmemory = '4 apples'",
        "[environment]\nallowed_hosts = ['a.org']",
        "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1",
        "[task]\nname = 'word'",
        "artifacts = [{source = '/app/../x'}]",
        "[[steps]]\nname = 'a/b'",
        "multi_step_reward_strategy = 'best'",
    ],
)
def test_what_harbor_refuses_is_refused(tmp_path: Path, config: str) -> None:
    harbor = package("harbor.models.task.task")
    folder = task(tmp_path / "one", config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not harbor.Task.is_valid_dir(folder)
    assert isinstance(ours(folder), str)
