"""Modules that are in `tokengrove` now are found by their old names, with a warning that names the new one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tokengrove.client
import tokengrove.roll.config
import tokengrove.rollout.episodes
from tokengrove.client import Sample
from tokengrove.old_names import new_name
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.run_folder import RunFolder


@pytest.fixture(autouse=True)
def only_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if new_name(name)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("proxy.client", tokengrove.client),
        ("proxy.rollout.episodes", tokengrove.rollout.episodes),
        ("proxy.rollout.roll.config", tokengrove.roll.config),
    ],
)
def test_an_old_name_is_the_same_module_and_names_the_new_one(old: str, new: object) -> None:
    with pytest.warns(FutureWarning) as told:
        assert import_module(old) is new
    assert f"{old} is {old.replace('proxy.rollout.roll', 'tokengrove.roll').replace('proxy', 'tokengrove')} now" in str(
        told[-1].message
    )
    assert new.__spec__.name == new.__name__  # type: ignore[attr-defined]


def test_what_was_pickled_under_an_old_name_loads() -> None:
    stored = pickle.dumps(Sample, protocol=0).replace(b"tokengrove.client.", b"proxy.client.")
    assert b"proxy.client" in stored
    with pytest.warns(FutureWarning):
        assert pickle.loads(stored) is Sample


def test_a_module_that_never_was_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tokengrove\.rollout\.nothing"), pytest.warns(FutureWarning):
        import_module("proxy.rollout.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"proxy\.nothing"):
        import_module("proxy.nothing")


def test_a_program_with_old_imports_runs_and_is_told() -> None:
    code = (
        "from proxy.rollout.verl import AgentLoopBase\nfrom proxy.client import Client\nprint(AgentLoopBase.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tokengrove.verl")
    assert "FutureWarning: proxy.rollout.verl is tokengrove.verl now" in done.stderr


def test_a_run_that_an_earlier_release_began_goes_on(tmp_path: Path) -> None:
    options = RunOptions(agent="tokengrove.roll.episodes:EnvironmentAgent", folder=str(tmp_path), name="kept")
    begun = RunFolder.open(options, [])
    begun.journal.close()
    told = (tmp_path / "kept" / "run.json").read_text()
    (tmp_path / "kept" / "run.json").write_text(told.replace("tokengrove.roll.", "proxy.rollout.roll."))
    resumed = RunFolder.open(options, [])
    resumed.journal.close()
    assert resumed.resumed and resumed.identity == begun.identity
