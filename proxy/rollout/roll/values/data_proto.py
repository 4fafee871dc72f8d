"""A batch in the shape of ROLL's DataProto: columns of tensors, columns of objects, and what is true of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class DataProto:
    """`batch`: arrays [B, ...]; `non_tensor_batch`: arrays of objects [B]; `meta_info`: of the whole batch.

    `batch` may also be a TensorDict or a dict of torch tensors, as code written for ROLL makes it.
    """

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        for columns in (self.batch, self.non_tensor_batch):
            for name in columns if columns is not None else ():
                return len(columns[name])
        return 0

    @staticmethod
    def concat(batches: Sequence[DataProto]) -> DataProto:
        """The rows of all batches, in order; `meta_info` is the first's. All must have the same columns."""
        first = batches[0]
        return DataProto(
            {name: np.concatenate([np.asarray(each.batch[name]) for each in batches]) for name in first.batch},
            {
                name: np.concatenate([each.non_tensor_batch[name] for each in batches])
                for name in first.non_tensor_batch
            },
            dict(first.meta_info),
        )
