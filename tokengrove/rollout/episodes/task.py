"""One task of the data: what an episode is about."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from tokengrove.client.options import SessionOptions


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the data. `task_id` is unique in a run; `data` is the row as it was read, in JSON's types.

    `options`: what the sessions of this task have beside those of the run; whoever plans episodes merges them.
    """

    task_id: str
    data: Mapping[str, Any]
    options: SessionOptions = field(default_factory=SessionOptions)

    def copied(self) -> Task:
        """The task with data of its own: an agent that appends to its messages changes no other episode."""
        return replace(self, data=deepcopy(dict(self.data)))
