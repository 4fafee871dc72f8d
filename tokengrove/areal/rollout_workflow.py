"""What runs one episode: the interface that AReaL's trainer calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class RolloutWorkflow(ABC):
    """Runs episodes. A class with `arun_episode` counts as one too, such as those that inherit from AReaL's own."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run an episode on `data`; return its interactions by id or its tensors, or None if it is not to be trained.

        `engine` is AReaL's inference engine; None where nothing needs it.
        """
