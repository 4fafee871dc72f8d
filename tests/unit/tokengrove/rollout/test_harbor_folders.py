"""What is read of Harbor's task folders, and what is said of those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.tokengrove.rollout.harbor_tasks import task, write
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.harbor import BadTask, TaskFolder, is_harbor, tasks

FULL = """
schema_version = "1.3"
artifacts = ["/app/out.txt", {source = "/app/logs", destination = "kept", exclude = ["*.tmp"]}]
[task]
name = "org/word"
description = "a word"
[metadata]
difficulty = "easy"
released = 2026-01-02
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
env = {A = "b"}
[environment.healthcheck]
command = "true"
retries = 7
[solution]
env = {S = "s"}
"""


def test_all_fields_of_a_task_are_read(tmp_path: Path) -> None:
    read = TaskFolder(task(tmp_path / "one", FULL))
    config, stage = read.config, read.stages[0]
    assert (read.name, read.instruction, config.schema_version) == ("org/word", "Write the word.\n", "1.3")
    assert (config.environment.memory_mb, config.environment.storage_mb, config.environment.cpus) == (4096, 100, 2)
    assert (config.environment.network_mode, config.environment.workdir) == ("no-network", "/work")
    assert config.environment.healthcheck is not None and config.environment.healthcheck.retries == 7
    assert (stage.agent_timeout_s, stage.verifier_timeout_s) == (30.0, 40.5)
    assert stage.verifier_env == {"KEY": "${THE_KEY:-none}"} and config.solution.env == {"S": "s"}
    assert [(each.source, each.destination) for each in stage.artifacts] == [
        ("/app/out.txt", None),
        ("/app/logs", "kept"),
    ]
    assert stage.solution == read.folder / "solution" and stage.tests == (read.folder / "tests",)
    assert list(config.unknown()) == []


def test_an_empty_file_has_the_defaults_of_harbor(tmp_path: Path) -> None:
    read = TaskFolder(task(tmp_path / "one"))
    config = read.config
    assert (config.agent.timeout_sec, config.verifier.timeout_sec) == (None, 600.0)
    assert (config.environment.build_timeout_sec, config.environment.network_mode) == (600.0, "public")
    assert (read.name, config.environment.os, read.stages[0].separate) == ("one", "linux", False)


def test_the_older_name_of_the_schema_version_is_taken(tmp_path: Path) -> None:
    assert TaskFolder(task(tmp_path / "one", 'version = "1.0"')).config.schema_version == "1.0"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("[agent]\ntimeout_sec = 'soon'", "task.toml: agent.timeout_sec: "),
        ("[agent]\ntimeout_sec = -1", "task.toml: agent.timeout_sec: "),
        ("[agent\n", "task.toml: "),
        ("[environment]\nos = 'plan9'", "task.toml: environment.os: "),
        ("[environment]\nmemory = '4 apples'", "'4 apples' is not a size such as 4G"),
        ("[environment]\nmemory = '4G'\nmemory_mb = 1", "contradict"),
        ("[environment]\nallowed_hosts = ['a.org']", "allowed_hosts needs network_mode = 'allowlist'"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "verifier: environment_mode"),
        ("[task]\nname = 'word'", "task.toml: task.name: 'word' must have the form organisation/name"),
        ("artifacts = ['/app/../x']", "must not contain '..'"),
        ("[[steps]]\nname = 'a/b'", "task.toml: steps.0.name: 'a/b' cannot be the name of a folder"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", "two steps have the name 'A'"),
        ("multi_step_reward_strategy = 'best'", "task.toml: multi_step_reward_strategy: "),
    ],
)
def test_an_error_names_the_file_and_the_field(tmp_path: Path, config: str, told: str) -> None:
    with pytest.raises(BadTask) as raised:
        TaskFolder(task(tmp_path / "one", config))
    assert told in str(raised.value) and str(tmp_path / "one" / "task.toml") in str(raised.value)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "task.toml"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = task(tmp_path / "one")
    (folder / missing).unlink()
    with pytest.raises(BadTask, match="is missing") as raised:
        TaskFolder(folder)
    assert str(folder / missing) in str(raised.value)


def test_files_outside_of_the_task_are_refused(tmp_path: Path) -> None:
    folder = task(tmp_path / "one")
    (tmp_path / "secret").write_text("s")
    (folder / "environment" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BadTask, match="leads out of the task's folder"):
        TaskFolder(folder)


def test_marks_of_a_benchmark_are_not_shown_to_the_agent(tmp_path: Path) -> None:
    text = "<!-- harbor-canary GUID 1 -->\n# canary 2\n\nDo it.\n# canary stays\n"
    read = TaskFolder(task(tmp_path / "one", files={"instruction.md": text}))
    assert read.instruction == "Do it.\n# canary stays\n"


def test_fields_without_a_meaning_are_named(tmp_path: Path) -> None:
    config = "[verifier]\ntimeout = 5\n[[steps]]\nname = 'a'\nreward = 1\n[metadata]\nany = 1\n"
    folder = task(tmp_path / "one", config, {"steps/a/instruction.md": "Go.", "steps/a/tests/test.sh": "true"})
    assert list(TaskFolder(folder).config.unknown()) == ["verifier.timeout", "steps.reward"]


def test_a_step_has_its_own_instruction_tests_and_limits(tmp_path: Path) -> None:
    config = """
    artifacts = ["/app/all"]
    [agent]
    timeout_sec = 10
    [verifier]
    env = {A = "task", B = "task"}
    [[steps]]
    name = "first"
    artifacts = ["/app/first"]
    verifier = {timeout_sec = 5, env = {B = "step"}}
    [[steps]]
    name = "second"
    agent = {timeout_sec = 20}
    """
    files = {
        "steps/first/instruction.md": "First.",
        "steps/first/tests/test.sh": "true",
        "steps/second/instruction.md": "Second.",
        "steps/second/solution/solve.sh": "true",
    }
    read = TaskFolder(task(tmp_path / "one", config, files))
    first, second = read.stages
    assert (first.name, first.instruction, second.instruction) == ("first", "First.", "Second.")
    assert (first.agent_timeout_s, second.agent_timeout_s, first.verifier_timeout_s) == (10.0, 20.0, 5.0)
    assert first.verifier_env == {"A": "task", "B": "step"}
    assert first.tests == (read.folder / "tests", read.folder / "steps/first/tests")
    assert second.tests == (read.folder / "tests",)
    assert first.solution == read.folder / "solution" and second.solution == read.folder / "steps/second/solution"
    assert [each.source for each in first.artifacts] == ["/app/all", "/app/first"]


def test_a_separate_verifier_with_an_image_of_its_own_needs_no_test_script_here(tmp_path: Path) -> None:
    config = "[verifier]\nenvironment_mode = 'separate'"
    folder = task(tmp_path / "one", config, {"tests/Dockerfile": "FROM scratch\n"})
    (folder / "tests/test.sh").unlink()
    read = TaskFolder(folder)
    assert read.stages[0].separate
    assert read.verifier_environment(read.stages[0]) == (read.config.environment, read.folder / "tests")


def test_a_folder_of_tasks_is_a_data_set(tmp_path: Path) -> None:
    task(tmp_path / "b", "[metadata]\nlevel = 1\nwhen = 2026-01-02")
    task(tmp_path / "group" / "a", "[task]\nname = 'org/a'")
    task(tmp_path / ".hidden")
    read = tasks(tmp_path)
    assert [each.task_id for each in read] == ["b", "group/a"]
    assert read[0].data["metadata"] == {"level": 1, "when": "2026-01-02"} and read[1].data["name"] == "org/a"
    assert json.loads(json.dumps(read[0].data)) == read[0].data
    assert TaskFolder(Path(read[1].data["harbor"])).instruction == read[1].data["instruction"]


def test_the_folder_called_tasks_has_the_tasks(tmp_path: Path) -> None:
    task(tmp_path / "tasks" / "a")
    task(tmp_path / "drafts" / "b")
    assert [each.task_id for each in tasks(tmp_path)] == ["tasks/a"]


def test_one_task_is_a_data_set(tmp_path: Path) -> None:
    assert [each.task_id for each in tasks(task(tmp_path / "one"))] == ["one"]


def test_every_task_that_cannot_be_read_is_named_at_once(tmp_path: Path) -> None:
    for name, config in (("a", "[agent]\ntimeout_sec = 'x'"), ("b", ""), ("c", "[verifier]\nenv = 1")):
        task(tmp_path / name, config)
    with pytest.raises(ConfigurationError) as raised:
        tasks(tmp_path)
    assert "agent.timeout_sec" in str(raised.value) and "verifier.env" in str(raised.value)


def test_a_registry_file_names_tasks_beside_it(tmp_path: Path) -> None:
    task(tmp_path / "all" / "one")
    file = tmp_path / "registry.json"
    entry = {"name": "my-one", "path": "all/one"}
    file.write_text(json.dumps([{"name": "d", "version": "1", "description": "", "tasks": [entry]}]))
    assert is_harbor(file) and [each.task_id for each in tasks(file)] == ["my-one"]
    file.write_text(json.dumps([{"name": "d", "tasks": [{**entry, "git_url": "https://git.example/x"}]}]))
    with pytest.raises(ConfigurationError, match="clone it"):
        tasks(file)


def test_other_data_is_told_apart(tmp_path: Path) -> None:
    write(tmp_path, {"rows.jsonl": "{}", "rows.json": "[{}]", "sub/file.txt": ""})
    assert [is_harbor(path) for path in (tmp_path, tmp_path / "rows.jsonl", tmp_path / "rows.json")] == [False] * 3
    with pytest.raises(ConfigurationError, match="no Harbor task"):
        tasks(tmp_path)
