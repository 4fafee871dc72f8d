"""`tokengrove watch --to`: each step of a run is written once, with the figures of `Client.runs`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import real_server, says, serving, user
from tokengrove import Client, commands
from tokengrove.commands.trackers import StepLog
from tokengrove.errors import ConfigurationError


class FakeRun:
    """A run that keeps what was logged. `last`: the last step that it had before."""

    def __init__(self, name: str, last: int | None = None) -> None:
        self.name, self.last = name, last
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.summary = {} if last is None else {"rollout/step": last}
        self.finished = False

    def log(self, *given: Any, **more: Any) -> None:
        step, figures = given if len(given) == 2 else (more.get("step"), given[0])
        self.logged.append((step, dict(figures)))

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("rollout/*", "rollout/step")

    def finish(self) -> None:
        self.finished = True


def entry(run: Any, step: Any, sessions: int = 1, **more: Any) -> dict[str, Any]:
    return {"run": run, "step": step, "sessions": sessions, "kl": None, "worst": [{}], **more}


def steps(run: FakeRun) -> list[int | None]:
    return [step for step, _ in run.logged]


def test_a_step_is_written_once_when_a_later_one_has_begun() -> None:
    runs: dict[str, FakeRun] = {}
    log = StepLog(lambda name: runs.setdefault(name, FakeRun(name)))
    assert list(log.write([entry("a", 0)], final=False)) == []
    assert runs == {}
    assert list(log.write([entry("a", 1), entry("a", 0), entry("b", 4.0)], final=False)) == ["a step 0: 1 sessions"]
    assert list(log.write([entry("a", 0), entry("a", 1), entry("a", 2), entry("b", 4.0)], final=False)) == [
        "a step 1: 1 sessions"
    ]
    every = [entry("a", 0), entry("a", 1), entry("a", 2), entry("b", 4.0)]
    assert len(list(log.write(every, final=True))) == 2
    assert list(log.write(every, final=True)) == []
    assert (steps(runs["a"]), steps(runs["b"])) == ([0, 1, 2], [4])
    log.finish()
    assert all(run.finished for run in runs.values())


def test_only_figures_that_are_known_are_written() -> None:
    run = FakeRun("unnamed")
    log = StepLog(lambda name: run)
    list(log.write([entry(None, 3, 7, mean_score=0.5, kl=0.0)], final=True))
    assert run.logged == [(3, {"rollout/sessions": 7.0, "rollout/mean_score": 0.5, "rollout/kl": 0.0})]


def test_sessions_without_a_whole_number_as_step_are_named_at_the_end() -> None:
    log = StepLog(FakeRun)
    given = [entry("a", None, 2), entry("a", "x", 3), entry("a", 1.5, 4), entry("a", 1)]
    assert list(log.write(given, final=False)) == []
    assert list(log.write(given, final=True)) == [
        "a step 1: 1 sessions",
        "not written: 9 sessions without a whole number as step",
    ]


def test_a_run_that_has_steps_already_is_continued_behind_them() -> None:
    run = FakeRun("a", last=1)
    log = StepLog(lambda name: run)
    lines = list(log.write([entry("a", step) for step in range(4)], final=True))
    assert steps(run) == [2, 3] and len(lines) == 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    asyncio.run(_filled(folder))
    with real_server(folder) as address:
        yield address


async def _filled(folder: Path) -> None:
    async with serving(folder, says(*["one"] * 8)) as server:
        for at in range(8):
            metadata = {"experiment": f"run/{at % 2}", "step": at // 4, "phase": at // 2}
            await server.ok("/rl/start_session", {"session_id": f"s{at}", "task_id": "t", "metadata": metadata})
            await server.chat([user("a")], f"s{at}")
            await server.ok(f"/s{at}/rl/end_session", {"reward": at / 8})


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_the_command_writes_the_figures_of_the_client(url: str, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**options: Any) -> FakeRun:
        opened.append((options, FakeRun(options["name"])))
        return opened[-1][1]

    monkeypatch.setitem(sys.modules, tracker, SimpleNamespace(init=init))
    ran = CliRunner().invoke(commands.app, ["watch", "--to", tracker, "--once", "--url", url, "--project", "p"])
    assert ran.exit_code == 0, ran.output
    with Client(url) as client:
        known = client.runs()
    assert [options["project"] for options, _ in opened] == ["p", "p"]
    assert {options.get("id") for options, _ in opened} == ({"run-0", "run-1"} if tracker == "wandb" else {None})
    for options, run in opened:
        mine = [each for each in known if each["run"] == options["name"]]
        assert len(mine) == len(run.logged) == 2
        for each, (step, figures) in zip(mine, run.logged, strict=True):
            assert figures.pop("rollout/step", step) == each["step"]
            assert figures["rollout/mean_score"] == each["mean_score"]
            assert figures.keys() == {
                f"rollout/{name}"
                for name, value in each.items()
                if value is not None and name not in ("run", "step", "worst")
            }
        assert run.finished


def test_other_keys_of_metadata_can_be_chosen(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun("unnamed")
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: run))
    flags = ["--run-key", "nothing", "--step-key", "phase"]
    ran = CliRunner().invoke(commands.app, ["watch", "--to", "trackio", "--once", "--url", url, *flags])
    assert ran.exit_code == 0, ran.output
    assert steps(run) == [0, 1, 2, 3]


def test_a_missing_package_is_named_with_the_way_to_get_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    ran = CliRunner().invoke(commands.app, ["watch", "--to", "wandb", "--once", "--url", url])
    assert isinstance(ran.exception, ConfigurationError)
    assert "tokengrove[wandb]" in str(ran.exception)


def test_lines_of_json_are_not_for_trackers(url: str) -> None:
    ran = CliRunner().invoke(commands.app, ["watch", "--to", "wandb", "--json", "--url", url])
    assert isinstance(ran.exception, ConfigurationError)
