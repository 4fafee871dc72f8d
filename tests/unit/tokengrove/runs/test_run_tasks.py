"""Tasks of a run: which files are read, which ids tasks have, and how an error names its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.tokengrove.runs import run_agents
from tests.vision import data_url, png
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import Task
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.agents import agent_of
from tokengrove.runs.rows import in_json
from tokengrove.runs.tasks import as_tasks, digest_of, tasks_of

ROWS = [{"q": "one", "n": 1}, {"q": "two", "n": 2}]


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def lines(path: Path, rows: list[object]) -> str:
    return written(path, "\n".join(map(json.dumps, rows)))


def test_rows_of_jsonl_and_json_are_the_same_tasks(tmp_path: Path) -> None:
    of_lines = tasks_of(lines(tmp_path / "t.jsonl", [*ROWS]))
    assert of_lines == tasks_of(written(tmp_path / "t.json", json.dumps(ROWS)))
    assert [task.data for task in of_lines] == ROWS


def test_a_csv_file_has_rows_of_text_under_the_names_of_its_first_line(tmp_path: Path) -> None:
    found = tasks_of(written(tmp_path / "t.csv", '\ufeffq,n\r\n"one, or\n1",1\r\ntwo,2\r\n'))
    assert [task.data for task in found] == [{"q": "one, or\n1", "n": "1"}, {"q": "two", "n": "2"}]


def test_a_parquet_file_has_rows_in_the_types_of_json(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"q": ["one"], "tests": [[{"in": 1}]]}), tmp_path / "t.parquet")
    assert tasks_of(str(tmp_path / "t.parquet"))[0].data == {"q": "one", "tests": [{"in": 1}]}


def test_images_of_a_table_are_data_urls(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"image": [{"bytes": png(4, 4), "path": None}]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert tasks_of(str(tmp_path / "t.parquet"))[0].data == {"image": {"bytes": data_url(png(4, 4)), "path": None}}
    assert in_json("row 1", {"images": [png(4, 4)]}) == {"images": [data_url(png(4, 4))]}
    with pytest.raises(ConfigurationError, match=r"row 1: JSON cannot express this task: .*bytes"):
        in_json("row 1", {"images": [b"no picture"]})


@pytest.mark.parametrize("name", ["TASKS", "tasks"])
def test_a_python_path_names_rows_or_a_function_that_returns_them(name: str) -> None:
    found = tasks_of(f"tests.unit.tokengrove.runs.run_agents:{name}")
    assert [task.data for task in found] == run_agents.TASKS


def test_ids_are_those_of_the_field_task_id_or_of_the_field_that_is_named(tmp_path: Path) -> None:
    data = lines(tmp_path / "t.jsonl", [{"task_id": "a", "uid": 7}, {"task_id": "b", "uid": 8}])
    assert [task.task_id for task in tasks_of(data)] == ["a", "b"]
    assert [task.task_id for task in tasks_of(data, "uid")] == ["7", "8"]


def test_ids_of_rows_without_one_are_the_same_whenever_they_are_read_and_differ_even_for_equal_rows(
    tmp_path: Path,
) -> None:
    data = lines(tmp_path / "t.jsonl", [ROWS[0], ROWS[0], ROWS[1]])
    first, again = tasks_of(data), tasks_of(data)
    assert [task.task_id for task in first] == [task.task_id for task in again]
    assert len({task.task_id for task in first}) == 3
    assert tasks_of(data, limit=2) == first[:2]


def test_a_digest_tells_data_apart() -> None:
    one, other = as_tasks(ROWS), as_tasks([ROWS[0], {"q": "two", "n": 3}])
    assert digest_of(one) == digest_of(as_tasks([dict(reversed(row.items())) for row in ROWS]))
    assert digest_of(one) != digest_of(other)


def test_a_trainer_gives_mappings_or_tasks() -> None:
    assert as_tasks([Task("x", {"q": 1}), {"task_id": 3}]) == [Task("x", {"q": 1}), Task("3", {"task_id": 3})]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"q": 1}\n\n{"q": 2\n', "t.jsonl, line 3, column 8: this is not JSON"),
        ("t.jsonl", '{"q": 1}\n[2]\n', "t.jsonl, line 2: a task is an object with fields, not list"),
        ("t.jsonl", '{"task_id": "a"}\n{"task_id": "a"}', "t.jsonl, line 2: the task's id 'a' is that of"),
        ("t.jsonl", '{"task_id": ["a"]}', "t.jsonl, line 1: the task's id 'task_id' must be text or a whole number"),
        ("t.jsonl", '{"task_id": "a\\u0000b"}', "t.jsonl, line 1: the task's id 'a\\x00b' has a NUL"),
        ("t.jsonl", "", "t.jsonl has no tasks"),
        ("t.json", '{"q": 1}', "is a list; for one object a line, name it .jsonl"),
        ("t.json", '[{"q": 1}, 2]', "t.json, item 2: a task is an object"),
        ("t.csv", "a,b\n1,2\n3\n", "t.csv, line 3: the row has not as many fields"),
        ("t.txt", "one", "a file of tasks ends with .jsonl, .json, .csv, .parquet"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        tasks_of(written(tmp_path / name, text))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("nowhere.jsonl", "there is no such file"),
        ("tests.unit.tokengrove.runs.run_agents:nothing", "has no 'nothing'"),
        ("tests.unit.tokengrove.runs.run_agents:__name__", "is str, not an iterable of tasks"),
        ("no_such_module:tasks", "there is no module 'no_such_module'"),
        ("json:dumps", "--data json:dumps: it cannot be called for the tasks: TypeError: dumps() missing"),
    ],
)
def test_a_name_that_leads_to_no_tasks_is_told(data: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        tasks_of(data)
    assert message in str(raised.value)


def test_a_row_without_the_field_of_ids_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="line 2: the task has no 'uid'"):
        tasks_of(lines(tmp_path / "t.jsonl", [{"uid": 1}, {"q": 2}]), "uid")


def test_a_folder_without_harbor_tasks_and_a_file_of_other_bytes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a folder without Harbor tasks"):
        tasks_of(str(tmp_path))
    (tmp_path / "t.jsonl").write_bytes(b'{"q": "\xff"}')
    with pytest.raises(ConfigurationError, match="is not UTF-8 text"):
        tasks_of(str(tmp_path / "t.jsonl"))


def test_tasks_of_harbor_are_read_from_their_folders_and_played_as_these_say(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "one"
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text("Do it.")
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    tasks = tasks_of(str(tmp_path / "tasks"))
    assert [task.task_id for task in tasks] == ["one"]
    spec = agent_of(RunOptions(command=("claude", "-p")), tasks[0])
    assert (spec.target, spec.arguments["agent"]) == ("tokengrove.rollout.harbor:HarborAgent", ["claude", "-p"])
    plain = agent_of(RunOptions(command=("claude", "-p")), Task("t", {"harbor": "a city"}))
    assert (plain.kind, plain.words) == ("command", ("claude", "-p"))
