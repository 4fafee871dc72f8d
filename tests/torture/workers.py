"""The workers of one server without their processes: an engine, a gate, and calls from one to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from proxy.workers.leader import Follower, Leader
from proxy.workers.peers import Unreachable
from tests.engines.gates import AdminGate


class Worker:
    """One process. `leader`: None if it follows. `ready`: it has started and knows what the others do."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        self.engine = engine
        self.gate = AdminGate(engine, **settings)
        self.follower = Follower(engine, self.gate)
        self.leader: Leader | None = None
        self.ready = False

    async def answer(self, step: str, *arguments: Any) -> Any:
        """Answer a call of another worker."""
        of_gate = step in ("hold", "let_in", "until_idle", "load")
        latest = self.leader if self.leader is not None and step == "latest" else self.follower
        return await getattr(self.gate if of_gate else latest, step)(*arguments)


class Peers:
    """The calls of the worker `number` to those of `workers` that live."""

    def __init__(self, workers: Mapping[int, Worker], number: int) -> None:
        self._workers, self._number = workers, number

    async def ask_all(self, step: str, *arguments: Any) -> list[Any]:
        """What those say that could be reached. Raises the first error of one."""
        others = [number for number in sorted(self._workers) if number != self._number]
        results = await asyncio.gather(*(self._ask(one, step, *arguments) for one in others), return_exceptions=True)
        reached = [result for result in results if not isinstance(result, Unreachable)]
        for result in reached:
            if isinstance(result, BaseException):
                raise result
        return reached

    async def _ask(self, number: int, step: str, *arguments: Any) -> Any:
        """Call one. Raises Unreachable."""
        raise NotImplementedError
