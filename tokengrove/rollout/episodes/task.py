"""One task of the data."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from tokengrove.client.options import SessionOptions


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the data. `task_id` is unique in a run. `data`: the row as it was read, in JSON types.

    `options`: options of this task's sessions in addition to the run's; the planner of episodes merges them.
    """

    task_id: str
    data: Mapping[str, Any]
    options: SessionOptions = field(default_factory=SessionOptions)

    def copied(self) -> Task:
        """The task with a copy of its data, so that an agent that changes it does not affect other episodes."""
        return replace(self, data=deepcopy(dict(self.data)))
