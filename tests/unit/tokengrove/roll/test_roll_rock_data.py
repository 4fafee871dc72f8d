"""Tasks by seed: which row a seed gets, and what is read from which file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.roll import AgenticConfig, AgenticRolloutPipeline
from tokengrove.roll.rock import GlobalDataset, place_for_others, reset_datasets, shared_dataset

ROWS: list[dict[str, Any]] = [{"n": number, "extra_info": {"instanceid": f"task-{number}"}} for number in range(5)]


def written(folder: Path, name: str = "tasks.jsonl") -> str:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return str(folder / name)


@pytest.mark.parametrize("mode", ["train", "sample"])
def test_a_seed_draws_the_row_that_python_draws_for_it(tmp_path: Path, mode: str) -> None:
    dataset = GlobalDataset(written(tmp_path), mode=mode)
    for seed in range(20):
        random.seed(seed)
        assert dataset.get_data_item(seed) == ROWS[random.randint(0, 4)]


@pytest.mark.parametrize("mode", ["traversal", "val"])
def test_a_traversal_gives_each_new_seed_the_next_row_until_none_is_left(tmp_path: Path, mode: str) -> None:
    dataset = GlobalDataset(written(tmp_path), mode=mode)
    assert [dataset.get_data_item(seed) for seed in (9, 3, 9, 7)] == [ROWS[0], ROWS[1], ROWS[0], ROWS[2]]
    assert [dataset.get_data_item(seed) for seed in (1, 2, 4, 5, 4, 3)] == [ROWS[3], ROWS[4], None, None, None, ROWS[1]]
    dataset.reset()
    assert dataset.get_data_item(5) == ROWS[0]


def test_runners_of_a_process_share_a_traversal_and_a_changed_row_stays_theirs(tmp_path: Path) -> None:
    name = written(tmp_path)
    one, other = shared_dataset(name, "traversal"), shared_dataset(name, "traversal")
    row = one.get_data_item(1)
    assert row is not None and other.get_data_item(2) == ROWS[1]
    row["extra_info"]["instanceid"] = "changed"
    assert other.get_data_item(1) == ROWS[0]
    reset_datasets("traversal")
    assert other.get_data_item(3) == ROWS[0]
    assert shared_dataset(name, "train") is not one


def test_each_validation_has_the_tasks_from_the_first_on(tmp_path: Path) -> None:
    dataset, given = shared_dataset(written(tmp_path), "val"), []

    class Validation:
        def get_batch(self, data: Any, batch_size: int) -> None:
            given.append(dataset.get_data_item(len(given)))

    config = AgenticConfig({"rollout_batch_size": 4, "val_batch_size": 4, "sequence_length": 64})
    pipeline = AgenticRolloutPipeline(config, url="http://unreachable.invalid")
    for step in range(2):
        pipeline._validated(Validation(), step)  # type: ignore[arg-type]
    assert given == [ROWS[0], ROWS[0]]


def test_other_processes_ask_this_one_for_the_places_of_a_traversal_until_it_is_reset() -> None:
    assert [place_for_others("val", "tasks", seed) for seed in (7, 3, 7, 9)] == [0, 1, 0, 2]
    reset_datasets("train")
    assert place_for_others("val", "tasks", 5) == 3
    reset_datasets("val")
    assert place_for_others("val", "tasks", 9) == 0


def test_a_filter_acts_once_by_its_name(tmp_path: Path) -> None:
    dataset = GlobalDataset(written(tmp_path), mode="traversal")
    dataset.filter("odd", lambda row: row["n"] % 2 == 1)
    dataset.filter("odd", lambda row: False)
    assert (dataset.size(), dataset.get_data_item(0)) == (2, ROWS[1])


def test_files_of_all_kinds_and_folders_of_one_kind_have_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    for name in ("rows.parquet", "rows.arrow", "rows.json", "lines.json"):
        written(tmp_path, "lines.json")
        assert GlobalDataset(str(tmp_path / name), mode="traversal").dataset == ROWS, name
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder, "b.jsonl")
    written(folder, "a.jsonl")
    assert GlobalDataset(str(folder)).dataset == ROWS + ROWS
    assert GlobalDataset([written(folder, "a.jsonl")]).dataset == ROWS
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    assert GlobalDataset(str(tmp_path / "rows.csv")).dataset == [{"a": "1", "b": "2"}]


def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"n": 1}\n[2]\n')
    (tmp_path / "cut.jsonl").write_text('{"n": 1}\n{"n"\n')
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "mixed").mkdir()
    written(tmp_path / "mixed", "a.jsonl")
    (tmp_path / "mixed" / "b.yaml").write_text("")
    for name, text in {
        "bad.jsonl": "line 2 is not an object",
        "cut.jsonl": "line 2",
        "none.jsonl": "no rows",
        "mixed": "one kind",
        "absent": "no file or folder",
    }.items():
        with pytest.raises(InvalidRequest, match=text):
            GlobalDataset(str(tmp_path / name))
