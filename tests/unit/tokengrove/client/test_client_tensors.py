"""Samples as batches: AReaL's names, dtypes and shapes; padding is never trained."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samples import sample
from tokengrove.client import Export
from tokengrove.client.libraries import library
from tokengrove.client.tensors import pad_left, pad_right
from tokengrove.errors import InvalidRequest

DTYPES = {
    "input_ids": np.int32,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "turn_ids": np.int32,
    "attention_mask": np.bool_,
    "rewards": np.float32,
}


def test_a_sample_is_areals_tensor_dict_in_numpy() -> None:
    tensors = sample([1, 2, 3], [4, 5], reward=0.5).to_tensor_dict()
    assert {name: array.dtype for name, array in tensors.items()} == {n: np.dtype(d) for n, d in DTYPES.items()}
    assert {array.shape for name, array in tensors.items() if name != "rewards"} == {(1, 5)}
    assert tensors["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert tensors["loss_mask"].tolist() == [[0, 0, 0, 1, 1]]
    assert tensors["versions"].tolist() == [[-1, -1, -1, 0, 0]]
    assert tensors["attention_mask"].all()
    assert tensors["rewards"].tolist() == [0.5]


def test_a_batch_is_padded_on_the_right_and_its_padding_is_never_trained() -> None:
    short, long = sample([1], [2], reward=1.0), sample([3, 4], [5, 6, 7], reward=-1.0)
    batch = Export([short, long], {}).to_tensor_dict(pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 9, 9, 9], [3, 4, 5, 6, 7]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[True, True, False, False, False], [True] * 5]
    assert batch["versions"].tolist() == [[-1, 0, -1, -1, -1], [-1, -1, 0, 0, 0]]
    assert batch["turn_ids"].tolist() == batch["versions"].tolist()
    assert batch["logprobs"][0, 2:].tolist() == [0.0, 0.0, 0.0]
    assert batch["rewards"].tolist() == [1.0, -1.0]


def test_an_empty_export_is_an_empty_batch_of_the_same_dtypes() -> None:
    batch = Export([], {}).to_tensor_dict()
    assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
        name: (np.dtype(dtype), (0,) if name == "rewards" else (0, 0)) for name, dtype in DTYPES.items()
    }


def test_torch_tensors_have_the_same_values_and_dtypes_and_separate_memory() -> None:
    torch = pytest.importorskip("torch")
    one = sample([1, 2], [3], reward=2.0)
    tensors = one.to_torch()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        **dict.fromkeys(("input_ids", "loss_mask", "versions", "turn_ids"), torch.int32),
        **{"logprobs": torch.float32, "rewards": torch.float32, "attention_mask": torch.bool},
    }
    tensors["input_ids"][0, 0] = 7
    assert one.input_ids.tolist() == [1, 2, 3]
    assert Export([one], {}).to_torch()["input_ids"].tolist() == [[1, 2, 3]]


def test_padding_goes_to_either_side_up_to_a_length() -> None:
    rows = [np.array([1, 2]), np.array([3])]
    assert pad_left(rows, np.int64, 0).tolist() == [[1, 2], [0, 3]]
    assert pad_left(rows, np.int64, 0, 3).tolist() == [[0, 1, 2], [0, 0, 3]]
    assert pad_right(rows, np.int64, 0, 3).tolist() == [[1, 2, 0], [3, 0, 0]]


def test_a_library_that_is_missing_is_named_with_the_way_to_get_it() -> None:
    with pytest.raises(InvalidRequest, match="pip install no_such_library"):
        library("no_such_library.part")
