"""A queue as ROLL's managers call it, for tests: so many episodes, and all that was put."""

from __future__ import annotations

from typing import Any

from tokengrove.roll import DataProto


class Queue:
    """Gives out the episodes `0 ... episodes - 1`; `puts` has the arguments of each `put`, in order."""

    def __init__(self, episodes: int) -> None:
        self._next, self._episodes = 0, episodes
        self.puts: list[tuple[Any, ...]] = []

    def get_episode_id(self, group_id: int, env_id: int) -> int | None:
        self._next += 1
        return self._next - 1 if self._next <= self._episodes else None

    def put(self, *arguments: Any) -> None:
        self.puts.append(arguments)

    @property
    def rollouts(self) -> list[DataProto]:
        """What was put before the final None."""
        assert self.puts[-1][3] is None
        return [put[3] for put in self.puts[:-1]]
