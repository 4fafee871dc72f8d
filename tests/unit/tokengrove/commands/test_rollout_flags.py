"""The command line of `tokengrove rollout` and `eval`: what becomes of flags, and what wrong ones are answered with."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokengrove.commands import run_command
from tokengrove.commands.application import app
from tokengrove.commands.rollout import rollout
from tokengrove.commands.run_flags import run_options_of
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import FailureKind
from tokengrove.rollout.run_options import RETRYABLE, RunOptions

AGENT = "tests.unit.tokengrove.runs.run_agents:asks"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"question": "one"}\n')
    return tmp_path


def chosen(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[RunOptions, dict[str, Any]]:
    """The options, and the settings of the run's own server, that a command line asks for."""
    found: list[Any] = []

    def note(asked: Any, what: Any) -> int:
        found.append(what)
        return 0

    monkeypatch.setattr(run_command, "_run", note)
    ended = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return found[0].options, dict(found[0].server)


def told(*arguments: str) -> str:
    """What a command line that is wrong is told."""
    with pytest.raises(ConfigurationError) as raised:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(raised.value)


VALUES: dict[str, tuple[list[str], object]] = {
    "agent_arg": (["depth=3", "name=x"], {"depth": 3, "name": "x"}),
    "scorer": (["m:f", "m:g"], ("m:f", "m:g")),
    "retry_on": (["agent", "timeout"], ("agent", "timeout")),
    "sampling": (["temperature=0.5"], {"temperature": 0.5}),
    "limits": (["max_turns=3"], {"max_turns": 3}),
    "session": (["discount=0.9"], {"discount": 0.9}),
    "metadata": (["a=[1]"], {"a": [1]}),
    "ray_runtime_env": (["pip=[]"], {"pip": []}),
    "success": (["0.5"], 0.5),
    "timeout_s": (["2.5"], 2.5),
    "start_timeout_s": (["2.5"], 2.5),
    "scoring_timeout_s": (["2.5"], 2.5),
    "ray_cpus": (["0.5"], 0.5),
}
"""Values of flags that are not a word or a whole number, and what they are in the options."""


@pytest.mark.parametrize(
    "spec", [spec for spec in fields(RunOptions) if "panel" in spec.metadata], ids=lambda spec: spec.name
)
def test_every_option_has_a_flag_of_its_name(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = f"--{spec.name.replace('_', '-')}"
    if spec.type == "bool":
        options, _ = chosen(monkeypatch, "rollout", AGENT, flag)
        assert getattr(options, spec.name) is True
        return
    default = ["3"] if str(spec.type).startswith("int") else ["word"]
    given, value = VALUES.get(spec.name, (default, 3 if default == ["3"] else "word"))
    options, _ = chosen(monkeypatch, "rollout", AGENT, *(part for each in given for part in (flag, each)))
    assert getattr(options, spec.name) == value


def test_flags_that_are_not_given_leave_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    options, server = chosen(monkeypatch, "rollout", AGENT)
    assert options == RunOptions(agent=AGENT)
    assert server == {}


def test_what_stands_behind_two_dashes_is_the_command_with_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    options, _ = chosen(monkeypatch, "eval", "--limit", "2", "--", "claude", "--url", "x", "--", "-p")
    assert (options.command, options.url, options.limit) == (("claude", "--url", "x", "--", "-p"), None, 2)
    assert (options.agent, options.validation) == (None, True)


def test_flags_of_an_export_are_the_body_of_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--format", "npz", "--train-turns", "0,2", "--advantages", "grpo", "--mask-unfinished")
    options, _ = chosen(monkeypatch, "rollout", AGENT, *flags)
    assert options.export == {
        "format": "npz",
        "train": {"turns": [0, 2]},
        "advantages": "grpo",
        "mask_unfinished": True,
    }


def test_settings_of_the_runs_own_server_are_names_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = chosen(monkeypatch, "rollout", AGENT, "--server", "engine=scripted", "--server", "workers=2")
    assert server == {"engine": "scripted", "workers": 2}


def test_the_admin_key_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENGROVE_ADMIN_KEY", "secret")
    options, _ = chosen(monkeypatch, "rollout", AGENT, "--url", "http://h")
    assert options.admin_key == "secret"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing plays: give the agent's class path"),
        ((AGENT, "extra"), "'extra' is one word too many: tasks are given by --data, a command behind --"),
        ((AGENT, "--", "claude"), "not both"),
        (("nowhere:agent",), "there is no module 'nowhere'"),
        ((AGENT, "--sampling", "hot"), "--sampling hot is not valid; give NAME=VALUE"),
        ((AGENT, "--sampling", "a=1", "--sampling", "a=2"), "--sampling a is given twice"),
        ((AGENT, "--url", "http://h", "--server", "port=1"), "leave --url out"),
        ((AGENT, "--url", "http://127.0.0.1:9"), "--url http://127.0.0.1:9"),
        ((AGENT, "--url", "http://h", "--data", "nowhere.jsonl"), "there is no such file"),
        ((AGENT, "--url", "http://h", "--retry-on", "bugs"), "--retry-on must be one of"),
        ((AGENT, "--url", "http://h", "--train-turns", "0,x"), "--train-turns 0,x is not valid"),
    ],
)
@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_what_is_wrong_with_a_command_line_is_named(command: str, arguments: tuple[str, ...], message: str) -> None:
    data = () if "--data" in arguments else ("--data", "tasks.jsonl")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    assert message in told(command, *arguments[:at], *data, *arguments[at:])


def test_data_without_tasks_is_an_error(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text("\n")
    assert "tasks.jsonl has no tasks" in told("rollout", AGENT, "--data", "tasks.jsonl")


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_the_help_explains_every_flag(command: str) -> None:
    ended = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert ended.exit_code == 0
    for parameter in inspect.signature(rollout).parameters.values():
        if parameter.annotation is not typer.Context and parameter.name != "words":
            option = parameter.annotation.__metadata__[0]
            assert option.help, parameter.name
    for spec in fields(RunOptions):
        if "panel" in spec.metadata:
            assert f"--{spec.name.replace('_', '-')}" in ended.output


def test_all_kinds_of_failures_but_the_end_of_the_run_can_be_retried() -> None:
    assert {*RETRYABLE, "cancelled"} == set(FailureKind.__args__)  # type: ignore[attr-defined]


def test_values_are_json_or_text() -> None:
    given = {"metadata": ["a=1", "b=x=y", 'c={"d": null}', "e="], "limit": 3, "name": None, "scorer": []}
    assert run_options_of(given) == {"metadata": {"a": 1, "b": "x=y", "c": {"d": None}, "e": ""}, "limit": 3}
    assert run_options_of({}) == {}


def test_flags_win_over_the_file_and_mappings_are_merged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run.yaml").write_text(
        "command: [claude]\ngroup_size: 4\nseed: 3\nsampling: {temperature: 0.5, max_tokens: 9}\nserver: {port: 1}\n"
    )
    flags = ("--config", "run.yaml", "--sampling", "max_tokens=3", "--server", "engine=scripted", "--group-size", "2")
    options, server = chosen(monkeypatch, "rollout", AGENT, *flags, "seed=5")
    assert (options.agent, options.command, options.group_size, options.seed) == (AGENT, (), 2, 5)
    assert options.sampling == {"temperature": 0.5, "max_tokens": 3}
    assert server == {"port": 1, "engine": "scripted"}


def test_words_that_change_the_file_are_no_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run.yaml").write_text(f"command: [claude]\ndata: tasks.jsonl\nagent: {AGENT}\n")
    options, _ = chosen(monkeypatch, "rollout", "--config", "run.yaml", "~command", "group_size=4")
    assert (options.agent, options.command, options.group_size) == (AGENT, (), 4)


def test_the_servers_settings_of_a_file_are_not_those_of_a_server_that_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "run.yaml").write_text(f"agent: {AGENT}\nserver: {{engine: scripted}}\n")
    options, server = chosen(monkeypatch, "rollout", "--config", "run.yaml", "--url", "http://127.0.0.1:9")
    assert (options.url, server) == ("http://127.0.0.1:9", {})
