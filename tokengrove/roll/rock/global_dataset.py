"""Data sets that the runners of a process share: which task an episode gets follows from its seed."""

from __future__ import annotations

import copy
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.rock.data_files import Row, read_rows

_IN_ORDER = ("traversal", "val")


class GlobalDataset:
    """The rows of a data set, handed out by seed; it may be used in several threads.

    In the modes `traversal` and `val` the rows are handed out in order, one for each new seed, and again for a seed
    that had one, until none is left. In every other mode a seed draws a row: the one of ROLL's `random.seed(seed)`,
    so equal seeds get equal rows in every process.
    """

    def __init__(
        self,
        dataset_name: str | Sequence[str],
        split: str = "train",
        mode: str = "sample",
        dataset_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the rows. Raises InvalidRequest for what cannot be read, see `data_files`, and for no rows at all."""
        self.dataset_name, self.split, self.mode = dataset_name, split, mode
        self.dataset = read_rows(dataset_name, split, dataset_kwargs)
        if not self.dataset:
            raise InvalidRequest(f"'dataset_name': {dataset_name!r} has no rows", param="dataset_name")
        self.filter_names: set[str] = set()
        self.idx = 0
        self.seed_to_idx: dict[int, int] = {}
        self._lock = threading.Lock()

    def get_data_item(self, seed: int) -> Row | None:
        """A copy of the row of `seed`; None if a traversal has no more."""
        with self._lock:
            if self.mode not in _IN_ORDER:
                at = random.Random(seed).randint(0, len(self.dataset) - 1)
            else:
                at = self._place(seed)
            return copy.deepcopy(self.dataset[at]) if at < len(self.dataset) else None

    def _place(self, seed: int) -> int:
        at = self.seed_to_idx.setdefault(seed, self.idx)
        self.idx += at == self.idx < len(self.dataset)
        return at

    def size(self) -> int:
        """The number of rows."""
        return len(self.dataset)

    def reset(self) -> None:
        """Begin a traversal again, as before each validation."""
        with self._lock:
            self.idx = 0
            self.seed_to_idx.clear()

    def filter(self, filter_name: str, function: Callable[[Row], bool]) -> None:
        """Keep the rows for which `function(row)` is true; a filter of the same name acts once."""
        with self._lock:
            if filter_name not in self.filter_names:
                self.dataset = [row for row in self.dataset if function(row)]
                self.filter_names.add(filter_name)


Places = Callable[[str, str, int], int]
"""The place of a seed in the traversal of a mode and a data set: from 0, one for each new seed."""


class _TraversedTogether(GlobalDataset):
    """Its places are given out elsewhere, for several processes."""

    def __init__(self, dataset_name: str | Sequence[str], mode: str, places: Places) -> None:
        super().__init__(dataset_name, mode=mode)
        self._places = places

    def _place(self, seed: int) -> int:
        return self._places(self.mode, str(self.dataset_name), seed)


_datasets: dict[str, GlobalDataset] = {}
_places: Places | None = None
_given: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
_lock = threading.Lock()


def shared_dataset(dataset_name: str | Sequence[str], mode: str) -> GlobalDataset:
    """The data set of this process for that name and mode; it is read when it is asked for first."""
    name = f"{mode}_{dataset_name}"
    with _lock:
        if name not in _datasets:
            if _places is None:
                _datasets[name] = GlobalDataset(dataset_name, mode=mode)
            else:
                _datasets[name] = _TraversedTogether(dataset_name, mode, _places)
        return _datasets[name]


def traverse_together(places: Places) -> None:
    """From now on this process gets the places of traversals from `places`, which it shares with others."""
    global _places
    with _lock:
        _places = places
        _datasets.clear()


def place_for_others(mode: str, dataset_name: str, seed: int) -> int:
    """The `Places` of this process, for those that go through a data set together."""
    with _lock:
        given = _given[mode, dataset_name]
        return given.setdefault(seed, len(given))


def reset_datasets(mode: str) -> None:
    """Begin the traversals of a mode again: of this process's data sets, and of those whose places it gives out."""
    with _lock:
        for key in [key for key in _given if key[0] == mode]:
            del _given[key]
        for dataset in _datasets.values():
            if dataset.mode == mode:
                dataset.reset()
