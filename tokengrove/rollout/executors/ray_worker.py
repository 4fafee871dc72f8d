"""The Ray actor that plays episodes, several at once on its event loop. It does not import Ray."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from tokengrove.rollout.episodes import EpisodePlan
from tokengrove.rollout.executors.agents import Agents
from tokengrove.rollout.executors.open_files import allow_open_files
from tokengrove.rollout.threads import left


class Episodes:
    """Plays episodes.

    `definitions`: the definitions of the driver's script that a plan names, pickled by cloudpickle.
    """

    def __init__(self) -> None:
        allow_open_files()
        self._agents = Agents()

    async def prepare(self, plan: EpisodePlan, key: bytes, definitions: bytes | None) -> None:
        _define(definitions)
        self._agents.make(plan.agent, key)

    async def play(self, plan: EpisodePlan, key: bytes, definitions: bytes | None) -> dict[str, Any]:
        _define(definitions)
        return (await self._agents.play(plan, key)).as_json()

    async def ping(self) -> int:
        """The number of threads that still run after the end of their episodes."""
        return left()

    async def close(self) -> None:
        await self._agents.close()


_defined: set[bytes] = set()


def _define(definitions: bytes | None) -> None:
    """Make `__main__:Name` the same object as in the driver's script, whose file this machine may not have."""
    if definitions is not None and definitions not in _defined:
        vars(sys.modules["__main__"]).update(pickle.loads(definitions))
        _defined.add(definitions)
