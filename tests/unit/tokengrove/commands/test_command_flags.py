"""The flags of `tokengrove rollout` for a command that is the agent."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import real_server
from tests.unit.tokengrove.rollout.command_episodes import CURL
from tokengrove.commands import run_command
from tokengrove.commands.application import app
from tokengrove.commands.rollout import rollout
from tokengrove.commands.run_flags import command_options_of
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.episodes import Task
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.agents import agent_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return tmp_path


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """The arguments of the agent that a command line asks for."""
    found: list[Any] = []

    def note(asked: Any, what: Any) -> int:
        found.append(what)
        return 0

    monkeypatch.setattr(run_command, "_run", note)
    ended = CliRunner().invoke(app, ["rollout", "--data", "tasks.jsonl", *words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return dict(found[0].options.agent_arg)


def test_every_option_of_a_command_is_a_flag_and_none_is_one_of_a_run() -> None:
    names = {each.name for each in fields(CommandOptions)}
    assert names < set(inspect.signature(rollout).parameters)
    assert not names & {each.name for each in fields(RunOptions)}


def test_flags_become_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--copy",
        "/",
        "--env",
        "A=1=2",
        "--env",
        "B=true",
        "--exit-codes",
        "0",
        "--exit-codes",
        "3",
        "--pass-env",
        "X_*",
    ]
    more = [
        "--command-timeout-s",
        "2.5",
        "--verifier",
        "true",
        "--any-exit-code",
        "--stdin",
        "task",
        "--agent-arg",
        "model=m",
    ]
    given = arguments(monkeypatch, *words, *more, "--", "sh", "-c", "--copy")
    assert given == {
        **{"copy": "/", "env": {"A": "1=2", "B": "true"}, "exit_codes": [0, 3], "pass_env": ["X_*"]},
        **{"command_timeout_s": 2.5, "verifier": "true", "any_exit_code": True, "stdin": "task", "model": "m"},
    }
    options = CommandOptions.read(given)
    assert (options.exit_codes, options.pass_env, options.model) == ((0, 3), ("X_*",), "m")
    assert arguments(monkeypatch, "--", "sh") == {}


def test_paths_begin_at_the_folder_of_the_run_for_all_of_its_processes(folder: Path) -> None:
    options = RunOptions(
        command=("true",),
        agent_arg={"copy": "a/{task_id}", "home": "/h", "verifier_files": "{data.tests}", "clone": "~/r", "model": "m"},
    )
    spec = agent_of(options, Task("t", {}))
    assert spec.arguments == {**options.agent_arg, "copy": f"{folder}/a/{{task_id}}"}


def test_a_variable_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--env A is not valid; give NAME=VALUE"):
        command_options_of({"env": ["A"]})


def test_wrong_options_of_a_command_end_the_run_before_it_starts(tmp_path: Path) -> None:
    words = ["rollout", "--data", "tasks.jsonl", "--url", "http://127.0.0.1:9"]
    with pytest.raises(ConfigurationError, match=r"--copy .*no-such is not a folder"):
        CliRunner().invoke(app, [*words, "--copy", "no-such", "--", "true"], catch_exceptions=False)
    with pytest.raises(ConfigurationError, match="there is no program 'no-such' on PATH"):
        CliRunner().invoke(app, [*words, "--", "no-such"], catch_exceptions=False)


def test_a_run_of_a_shell_script_writes_its_samples(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "turn.sh").write_text(CURL)
    with real_server(tmp_path, engine_arg=("tokens=4",)) as url:
        words = ["rollout", "--data", "tasks.jsonl", "--group-size", "2", "--url", url, "--json", "--quiet"]
        command = ["--copy", "agent", "--verifier", "test {data.prompt} = one", "--", "sh", "turn.sh"]
        ended = CliRunner().invoke(app, [*words, "--output", "samples.jsonl", *command], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sorted(sum(sample["rewards"]) for sample in samples) == [0.0, 0.0, 1.0, 1.0]
