"""Stored batches instead of played ones (`rollout_mock` of the configuration), to repeat a run of the trainer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from tokengrove.roll.values import DataProto


class RolloutMock:
    """Writes every batch to `dump_dir`/train or val/step_NNNNNN.pkl (`mode: dump`), or reads them (`mode: mock`).

    `settings`: None or not enabled: nothing is written or read. The files are pickles: read only your own.
    """

    def __init__(self, settings: Any, mode: str) -> None:
        enabled = settings is not None and settings.enable
        self.loads = bool(enabled and settings.mode == "mock")
        self._dumps = bool(enabled and settings.mode == "dump")
        self._folder = Path(settings.dump_dir, mode) if enabled else Path()

    def load(self, global_step: int) -> DataProto:
        """Read the batch of a step. Raises FileNotFoundError if it was not written."""
        path = self._path(global_step)
        if not path.exists():
            raise FileNotFoundError(f"rollout_mock: {path} does not exist; run the step with mode: dump first")
        batch: DataProto = pickle.loads(path.read_bytes())
        return batch

    def dump(self, global_step: int, batch: DataProto) -> None:
        """Write the batch of a step, in mode `dump`."""
        if self._dumps:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path(global_step).write_bytes(pickle.dumps(batch))

    def _path(self, global_step: int) -> Path:
        return self._folder / f"step_{global_step:06d}.pkl"
