"""The interface of workflows that AReaL's trainer calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class RolloutWorkflow(ABC):
    """Runs episodes. Any class with `arun_episode` is accepted, also one that inherits from AReaL's class."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run an episode on `data`; return its interactions by id or its tensors, or None if it must not be trained.

        `engine` is AReaL's inference engine, or None if the workflow does not need it.
        """
