"""Batches in the shape of ROLL's DataProto: rows that are joined, chosen and grouped, and ROLL's own class."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from tokengrove.roll import DataProto


def batch_of(rows: int, first: int = 0, **metrics: Any) -> DataProto:
    places = np.arange(first, first + rows)
    names = np.empty(rows, object)
    names[:] = [f"t{place % 2}" for place in places]
    tensors = {"input_ids": np.stack([places, places + 10], axis=1), "flag": places % 2 == 0}
    return DataProto(tensors, {"traj_id": names}, {"metrics": metrics, "seed": first})


def test_rows_are_joined_in_order_and_the_metrics_of_all_are_collected() -> None:
    joined = DataProto.concat([batch_of(2, 0, a=1.0), batch_of(1, 2, a=3.0, b=5.0), batch_of(0)])
    assert joined.batch["input_ids"].tolist() == [[0, 10], [1, 11], [2, 12]]
    assert joined.non_tensor_batch["traj_id"].tolist() == ["t0", "t1", "t0"]
    assert joined.meta_info == {"metrics": {"a": [1.0, 3.0], "b": [5.0]}, "seed": 0}
    again = DataProto.concat([joined, batch_of(1, 3, a=7.0)])
    assert again.meta_info["metrics"]["a"] == [1.0, 3.0, 7.0]
    assert (len(joined), len(again), joined.batch.batch_size) == (3, 4, (3,))


def test_one_batch_is_joined_to_itself_and_others_need_the_same_columns() -> None:
    alone = batch_of(2)
    assert DataProto.concat([alone]) is alone
    with pytest.raises(ValueError, match="at least one"):
        DataProto.concat([])
    with pytest.raises(ValueError, match="different columns"):
        DataProto.concat([alone, DataProto({"input_ids": np.zeros((1, 2))})])


def test_columns_have_equally_many_rows() -> None:
    with pytest.raises(ValueError, match="'a' 1, 'b' 2"):
        DataProto({"a": np.zeros(1), "b": np.zeros(2)})


def test_rows_are_chosen_by_index_slice_and_mask() -> None:
    batch = batch_of(4)
    for rows in ([3, 1], np.array([3, 1])):
        assert batch.select_idxs(rows).batch["input_ids"][:, 0].tolist() == [3, 1]
    assert batch[1:3].non_tensor_batch["traj_id"].tolist() == ["t1", "t0"]
    assert batch[batch.batch["flag"]].batch["input_ids"][:, 0].tolist() == [0, 2]
    assert (len(batch[2]), len(batch[[]]), len(DataProto())) == (1, 0, 0)
    assert [chunk.batch["input_ids"][0, 0] for chunk in batch.chunk(2)] == [0, 2]
    with pytest.raises(ValueError, match="4 rows"):
        batch.chunk(3)


def test_rows_are_grouped_by_columns_of_either_kind() -> None:
    groups = batch_of(4).group_by("traj_id")
    assert {name: group.batch["input_ids"][:, 0].tolist() for name, group in groups.items()} == {
        **{"t0": [0, 2], "t1": [1, 3]}
    }
    assert list(batch_of(2).group_by(["traj_id", "flag"])) == ["t0|True", "t1|False"]
    with pytest.raises(KeyError, match="nothing"):
        batch_of(1).group_by("nothing")


def test_columns_are_chosen_taken_out_and_added() -> None:
    batch = batch_of(2)
    chosen = batch.select(["flag"], [], deepcopy=True)
    assert (list(chosen.batch), chosen.non_tensor_batch, chosen.meta_info) == (["flag"], {}, batch.meta_info)
    chosen.meta_info["metrics"]["new"] = 1
    assert "new" not in batch.meta_info["metrics"]
    taken = batch.pop(["input_ids"], ["traj_id"], ["seed"])
    assert (list(batch.batch), batch.non_tensor_batch, taken.meta_info) == (["flag"], {}, {"seed": 0})
    assert list(batch.union(taken).batch) == ["flag", "input_ids"] and "traj_id" in batch.non_tensor_batch


def test_a_batch_crosses_to_other_processes() -> None:
    found = pickle.loads(pickle.dumps(batch_of(2)))
    assert found.batch.batch_size == (2,) and found.non_tensor_batch["traj_id"].tolist() == ["t0", "t1"]
