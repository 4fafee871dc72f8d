"""A batch in the form of ROLL's DataProto: columns of tensors, columns of objects, and information on the batch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

_OF_ALL = frozenset({"metrics"})
"""Keys that `concat` collects from all batches; other keys are taken from the first."""


class Columns(dict[str, Any]):
    """Arrays [B, ...] by name. `batch_size` is (B,), as in a TensorDict; it is (0,) without columns."""

    @property
    def batch_size(self) -> tuple[int, ...]:
        for column in self.values():
            return (len(column),)
        return (0,)


class DataProto:
    """`batch`: numpy arrays [B, ...]; `non_tensor_batch`: arrays of objects [B]; `meta_info`: of the whole batch.

    `batch` may also be a TensorDict or a mapping of torch tensors, as in code written for ROLL. `to_torch` converts
    numpy arrays to tensors, and `to_roll` returns an object of ROLL's own class. Raises ValueError for columns with
    different numbers of rows.
    """

    def __init__(
        self,
        batch: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch = Columns(batch) if type(batch) is dict else batch
        self.non_tensor_batch: dict[str, Any] = dict(non_tensor_batch or {})
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        lengths = {name: len(column) for name, column in self._columns()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
            raise ValueError(f"the columns of a batch must have equally many rows; these have {told}")

    def __len__(self) -> int:
        return next((len(column) for _, column in self._columns()), 0)

    def __repr__(self) -> str:
        names = ", ".join(name for name, _ in self._columns())
        return f"DataProto({len(self)} rows; {names}; meta_info of {', '.join(map(str, self.meta_info))})"

    def __getitem__(self, rows: int | slice | Sequence[int] | Any) -> DataProto:
        """A new batch with the rows of an index, a slice, or a sequence of indexes or bools."""
        if isinstance(rows, int | np.integer):
            rows = [rows]
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        return self.select_idxs(rows)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any],
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """A batch of these columns."""
        return cls(dict(tensors), non_tensors, meta_info)

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all batches, in order; all must have the same columns.

        Each of the `metrics` in `meta_info` becomes a list with the values of all batches. The other entries are those
        of the first batch, as in ROLL. A single batch is returned unchanged. Raises ValueError for no batches, and for
        different columns.
        """
        if not data:
            raise ValueError("concat needs at least one batch")
        if len(data) == 1:
            return data[0]
        first = data[0]
        for other in data[1:]:
            if {name for name, _ in other._columns()} != {name for name, _ in first._columns()}:
                raise ValueError(f"batches of different columns cannot be joined: {first!r} and {other!r}")
        batch = None if first.batch is None else {name: _joined([b.batch[name] for b in data]) for name in _keys(first)}
        others = {name: _joined([b.non_tensor_batch[name] for b in data]) for name in first.non_tensor_batch}
        collected = {name: _collected([b.meta_info.get(name) for b in data]) for name in _OF_ALL & _told(data)}
        return DataProto(batch, others, {**first.meta_info, **collected})

    def select_idxs(self, idxs: Any) -> DataProto:
        """A new batch with the rows of these indexes or bools, and the same `meta_info`."""
        places = np.asarray(idxs if len(idxs) else np.zeros(0, np.int64))
        batch = None if self.batch is None else {name: column[places] for name, column in self._tensors()}
        return DataProto(
            batch, {name: column[places] for name, column in self.non_tensor_batch.items()}, self.meta_info
        )

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A new batch with these columns; None: all. Raises KeyError for a column that does not exist."""
        batch = None if self.batch is None else _chosen(dict(self._tensors()), batch_keys)
        chosen = (batch, _chosen(self.non_tensor_batch, non_tensor_batch_keys), _chosen(self.meta_info, meta_info_keys))
        return DataProto(*(copy.deepcopy(chosen) if deepcopy else chosen))

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove these columns, and return them in a new batch; None: none."""
        batch = {name: self.batch.pop(name) for name in batch_keys or ()}
        others = {name: self.non_tensor_batch.pop(name) for name in non_tensor_batch_keys or ()}
        return DataProto(batch, others, {name: self.meta_info.pop(name) for name in meta_info_keys or ()})

    def union(self, other: DataProto) -> DataProto:
        """Add the columns of `other`, which replace those of the same name; return this batch."""
        if other.batch is not None:
            if self.batch is None:
                self.batch = Columns()
            for name in _keys(other):
                self.batch[name] = other.batch[name]
        self.non_tensor_batch |= other.non_tensor_batch
        self.meta_info |= other.meta_info
        return self

    def group_by(self, keys: str | Sequence[str]) -> dict[str, DataProto]:
        """Batches by the values of these columns as text, joined by `|` for several columns, as in ROLL.

        Raises KeyError for a column that does not exist.
        """
        names = [keys] if isinstance(keys, str) else list(keys)
        columns = dict(self._columns())
        rows: dict[str, list[int]] = defaultdict(list)
        for row in range(len(self)):
            rows["|".join(str(columns[name][row]) for name in names)].append(row)
        return {value: self.select_idxs(places) for value, places in rows.items()}

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into `chunks` batches of equal size, in order. Raises ValueError if the rows cannot be divided."""
        if len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} batches of equal size")
        size = len(self) // chunks
        return [self[start : start + size] for start in range(0, len(self), size)]

    def to_torch(self) -> DataProto:
        """The same batch with a TensorDict of torch tensors as `batch`. Raises InvalidRequest without tensordict."""
        return DataProto(self.to_tensordict(), self.non_tensor_batch, self.meta_info)

    def to_tensordict(self) -> Any:
        """`batch` as a TensorDict of batch size [B]. Raises InvalidRequest without tensordict."""
        from tokengrove.client.tensors import to_tensordict

        return to_tensordict({name: np.asarray(column) for name, column in self._tensors()})

    def to_roll(self) -> Any:
        """This batch as `roll.distributed.scheduler.protocol.DataProto`. Raises ModuleNotFoundError without ROLL."""
        theirs = import_module("roll.distributed.scheduler.protocol").DataProto
        return theirs(batch=self.to_tensordict(), non_tensor_batch=self.non_tensor_batch, meta_info=self.meta_info)

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        for name in _keys(self):
            yield name, self.batch[name]

    def _columns(self) -> Iterator[tuple[str, Any]]:
        yield from self._tensors()
        yield from self.non_tensor_batch.items()


def _keys(data: DataProto) -> list[str]:
    return [] if data.batch is None else list(data.batch.keys())


def _told(data: Sequence[DataProto]) -> set[str]:
    return {name for each in data for name, value in each.meta_info.items() if value is not None}


def _joined(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return import_module("torch").cat(list(columns))


def _collected(values: Sequence[Any]) -> Any:
    """Lists of the batches' values, by name if the values are mappings. Lists of earlier `concat`s are merged."""
    if not all(value is None or isinstance(value, Mapping) for value in values):
        return list(values)
    names = {name: None for value in values for name in value or ()}
    return {name: [each for value in values for each in _listed((value or {}).get(name))] for name in names}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | np.ndarray) else [value]


def _chosen(values: dict[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(values) if keys is None else {name: values[name] for name in keys}
