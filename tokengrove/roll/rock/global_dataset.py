"""Data sets that the runners of a process share. The seed of an episode determines its task."""

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
    """The rows of a data set, by seed. It may be used in several threads.

    In the modes `traversal` and `val` each new seed gets the next row, and a known seed its row again, until no rows
    are left. In every other mode a seed draws a row like ROLL's `random.seed(seed)`, so equal seeds get equal rows in
    every process.
    """

    def __init__(
        self,
        dataset_name: str | Sequence[str],
        split: str = "train",
        mode: str = "sample",
        dataset_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the rows. Raises InvalidRequest for files that cannot be read (see `data_files`), and for no rows."""
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
        """Restart a traversal, as before each validation."""
        with self._lock:
            self.idx = 0
            self.seed_to_idx.clear()

    def filter(self, filter_name: str, function: Callable[[Row], bool]) -> None:
        """Keep the rows for which `function(row)` is true; a filter with the same name is applied only once."""
        with self._lock:
            if filter_name not in self.filter_names:
                self.dataset = [row for row in self.dataset if function(row)]
                self.filter_names.add(filter_name)


Places = Callable[[str, str, int], int]
"""The position of a seed in the traversal of a mode and a data set: from 0, the next one for each new seed."""


class _TraversedTogether(GlobalDataset):
    """A data set whose positions are assigned for several processes."""

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
    """The data set of this process for that name and mode, read on first use."""
    name = f"{mode}_{dataset_name}"
    with _lock:
        if name not in _datasets:
            if _places is None:
                _datasets[name] = GlobalDataset(dataset_name, mode=mode)
            else:
                _datasets[name] = _TraversedTogether(dataset_name, mode, _places)
        return _datasets[name]


def traverse_together(places: Places) -> None:
    """From now on this process gets the positions of traversals from `places`, which several processes share."""
    global _places
    with _lock:
        _places = places
        _datasets.clear()


def place_for_others(mode: str, dataset_name: str, seed: int) -> int:
    """The `Places` of this process, for other processes that traverse a data set together."""
    with _lock:
        given = _given[mode, dataset_name]
        return given.setdefault(seed, len(given))


def reset_datasets(mode: str) -> None:
    """Restart the traversals of a mode: of this process's data sets, and of those whose positions it assigns."""
    with _lock:
        for key in [key for key in _given if key[0] == mode]:
            del _given[key]
        for dataset in _datasets.values():
            if dataset.mode == mode:
                dataset.reset()
