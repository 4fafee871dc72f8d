"""Harbor tasks in containers, by the words of `docker`, with a program that stands for it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import until
from tests.unit.tokengrove.rollout import harbor_docker
from tests.unit.tokengrove.rollout.harbor_rooms import rooms, shell, tried
from tests.unit.tokengrove.rollout.harbor_tasks import task, write
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.harbor import HarborOptions, TaskFolder
from tokengrove.rollout.harbor.container import Images
from tokengrove.rollout.harbor.harbor_sandbox import Blueprint
from tokengrove.rollout.harbor.sandboxes import Sandboxes
from tokengrove.rollout.harbor.task_config import Environment
from tokengrove.rollout.harbor.trial import Trial

__all__ = ["rooms"]
pytestmark = pytest.mark.usefixtures("rooms")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the calls of `docker`, which is on PATH."""
    state = tmp_path / "state"
    state.mkdir()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -E -S {harbor_docker.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("STAND_IN", str(state))
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return state / "calls"


def words(calls: Path, verb: str) -> list[list[str]]:
    return [call for call in map(json.loads, calls.read_text().splitlines()) if call[0] == verb]


CONFIG = """
[agent]
user = "alice"
[verifier]
user = "bob"
env = {SECRET = "s3cret"}
[environment]
cpus = 2
memory = "1G"
"""


async def test_a_task_is_built_once_and_runs_in_containers_that_are_removed(tmp_path: Path, calls: Path) -> None:
    tests = 'test "$SECRET$AS_USER" = s3cretbob && grep -q right answer.txt && echo 1 > /logs/verifier/reward.txt'
    folder = task(tmp_path / "one", CONFIG, {"tests/test.sh": tests})
    agent = 'test "$AS_USER" = alice && test "$(pwd)" = /app && test ! -e answer.txt && echo right > answer.txt'
    assert await tried(folder, shell(agent), sandbox="docker", sandbox_args=["--shm-size=1g"]) == {"reward": 1.0}
    (build,), (run,), (removed,) = (words(calls, verb) for verb in ("build", "run", "rm"))
    assert build[-1] == str(folder / "environment")
    name = run[run.index("--name") + 1]
    assert removed == ["rm", "--force", name] and not _alive(calls.parent / name)
    assert [run[run.index(flag) + 1] for flag in ("--cpus", "--memory")] == ["2", "1024m"]
    assert {"--rm", "--init", "--network=host", "--shm-size=1g"} <= set(run)
    assert "s3cret" not in _text(calls)  # no value is in a list of processes


async def test_episodes_that_start_at_once_share_one_build(tmp_path: Path, calls: Path) -> None:
    options = HarborOptions.read({"sandbox": "docker"})
    sandboxes, folder = Sandboxes(options), TaskFolder(task(tmp_path / "one"))
    trials = [Trial(folder, str(n), shell("echo right > answer.txt"), options, sandboxes.make) for n in range(3)]
    found = await asyncio.gather(*(trial.play() for trial in trials))
    assert found == [{"reward": 1.0}] * 3 and len(words(calls, "build")) == 1 and len(words(calls, "run")) == 3


async def test_what_an_agent_left_is_killed_before_the_tests_and_the_container_stays(
    tmp_path: Path, calls: Path
) -> None:
    tests = "! grep -qs forever /proc/[0-9]*/comm && echo 1 > /logs/verifier/reward.txt"
    folder = task(tmp_path / "one", files={"tests/test.sh": tests})
    agent = "cp /bin/sleep /app/forever; (/app/forever 1000 &) > /dev/null 2>&1"
    found = await tried(folder, shell(agent), sandbox="docker", kill_before_tests=True)
    assert found == {"reward": 1.0}


async def test_a_task_may_have_a_path_of_its_own(tmp_path: Path, calls: Path) -> None:
    config = '[environment]\nenv = {PATH = "/usr/bin:/bin", HOME = "/app"}'
    folder = task(tmp_path / "one", config, {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt"})
    assert await tried(folder, shell('test "$PATH" = /usr/bin:/bin'), sandbox="docker") == {"reward": 1.0}


async def test_a_ready_made_image_gets_the_files_of_the_task(tmp_path: Path, calls: Path) -> None:
    write(calls.parent, {"image-made": "/srv/work"})
    folder = task(tmp_path / "one", '[environment]\ndocker_image = "made"', {"environment/data.txt": "right"})
    os.remove(folder / "environment" / "Dockerfile")
    agent = "mkdir -p /app && cp data.txt /app/answer.txt"
    assert await tried(folder, shell(agent), sandbox="docker") == {"reward": 1.0}
    assert words(calls, "build") == []


async def test_a_build_for_which_nobody_waits_any_more_is_ended(tmp_path: Path, calls: Path) -> None:
    folder = task(tmp_path / "one", files={"environment/Dockerfile": "slow"})
    sandboxes = Sandboxes(HarborOptions.read({"sandbox": "docker"}))
    sandbox = sandboxes.make(Blueprint(Environment(), folder / "environment", {}, folder))
    starting = asyncio.ensure_future(sandbox.start())
    building = calls.parent / "building"
    await until(building.exists)
    starting.cancel()
    await sandboxes.close()
    process = Path("/proc", building.read_text())
    await until(lambda: not process.exists())


async def test_an_image_that_cannot_be_built_says_why(tmp_path: Path, calls: Path) -> None:
    folder = task(tmp_path / "one", files={"environment/Dockerfile": "broken"})
    with pytest.raises(RuntimeError, match="the build is broken"):
        await tried(folder, shell("true"), sandbox="docker")


def test_a_program_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigurationError, match="there is no program 'podman-absent'"):
        Images("podman-absent")


def _alive(folder: Path) -> bool:
    return Path("/proc", (folder / "pid").read_text()).exists()


def _text(calls: Path) -> str:
    return calls.read_text()
