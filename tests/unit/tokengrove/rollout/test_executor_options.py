"""The options of executors: what cannot be is refused before anything starts, by the name of its flag."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.executors import ExecutorOptions, RayOptions, executor_for
from tokengrove.rollout.executors.open_files import allow_open_files
from tokengrove.rollout.executors.ray_cluster import runtime_env


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cloud"}, "--executor is 'cloud'; it must be one of local, process, ray"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"kind": "process", "workers": 0}, "--workers is 0"),
        ({"workers": 2}, "--workers applies to --executor process; this is --executor local"),
        ({"kind": "process", "ray": RayOptions()}, "the options of Ray apply to --executor ray"),
    ],
)
def test_options_that_cannot_be_are_refused_by_the_names_of_their_flags(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ExecutorOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"num_cpus": -1.0}, "--ray-cpus is -1.0"), ({"episodes_per_worker": 0}, "--ray-episodes is 0")],
)
def test_options_of_ray_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RayOptions(**fields)


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"--executor ray needs the package ray: pip install '\.\[ray\]'"):
        executor_for(ExecutorOptions("ray"))


def test_workers_of_ray_look_for_modules_where_the_program_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = str(Path(sys.prefix) / "lib")
    monkeypatch.setattr(sys, "path", [str(tmp_path), installed, str(tmp_path / "missing"), str(tmp_path)])
    given = {"working_dir": ".", "env_vars": {"MINE": "1"}}
    made = runtime_env(RayOptions(runtime_env=given))
    assert made == {"working_dir": ".", "env_vars": {"MINE": "1", "PYTHONPATH": str(tmp_path)}}
    own = {"env_vars": {"PYTHONPATH": "/srv/agents"}}
    assert runtime_env(RayOptions(runtime_env=own)) == own


def test_there_are_never_more_processes_than_episodes() -> None:
    assert ExecutorOptions("process", 2, workers=8).processes == 2
    assert ExecutorOptions("process", 64, workers=8).processes == 8
    assert 1 <= ExecutorOptions("process", 64).processes <= 64


def test_a_limit_of_open_files_is_raised_and_told_if_it_stays_too_low(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    allow_open_files(900)
    assert limits == [(4096, 4096)]
    assert not caplog.records
    allow_open_files(1000)
    assert "1000 episodes at once may need 4128 open files, and this machine allows 4096" in caplog.text
