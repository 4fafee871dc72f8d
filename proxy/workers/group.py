"""One worker's part in the group of workers: what it tells and answers the others, wired to its engine and its gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.engine.admin import EngineAdmin
from proxy.engine.chunks import TokenChunk
from proxy.engine.gate import Gate
from proxy.engine.interface import Engine, ServerPool, SharedEngine
from proxy.engine.requests import GenerateRequest
from proxy.errors import ConfigurationError
from proxy.metrics import Metrics
from proxy.types import FinishReason
from proxy.workers.common_metrics import CommonMetrics
from proxy.workers.leader import LEADER, CommonPool, Follower, Gates, Leader
from proxy.workers.peers import Peers, Unreachable
from proxy.workers.seats import Seat, Seats

Step = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a worker among the others: its `number`, the shared memory, and the `folder` of the sockets."""

    number: int
    seats: Seats
    folder: Path

    @property
    def leads(self) -> bool:
        """True for the worker that administers the engine."""
        return self.number == LEADER

    def peers(self) -> Peers:
        """The other workers."""
        return Peers(self.folder, self.number, self.seats.workers)

    def seat(self) -> Seat:
        """The worker's own part of the shared memory."""
        return Seat(self.seats, self.number)


class Group:
    """The other workers, from the point of view of the worker at `place`. Raises ConfigurationError."""

    def __init__(self, place: Place, peers: Peers, engine: Engine, gate: Gate, metrics: Metrics) -> None:
        if not isinstance(engine, SharedEngine):
            raise ConfigurationError("--workers: this engine belongs to one process")
        self._peers, self._engine, self._gate = peers, engine, gate
        engine.leads = False
        self.metrics = CommonMetrics(metrics, peers, place.folder)
        self._follower = Follower(engine, gate)
        self._leader = Leader(engine, Gates(gate, peers), self._follower, peers) if place.leads else None

    @property
    def admin(self) -> EngineAdmin | None:
        """The administration of the engine for all workers, on the worker that leads."""
        return None if self._leader is None else self._leader.admin

    @property
    def pool(self) -> ServerPool | None:
        """The engine servers of all workers, on the worker that leads."""
        if self._leader is None or not isinstance(self._engine, ServerPool):
            return None
        return CommonPool(self._engine, self._leader, self._peers)

    async def catch_up(self) -> None:
        """Before the engine starts."""
        await self._follower.catch_up(self._peers)

    async def join(self) -> None:
        """Once the engine has started."""
        if self._leader is not None:
            await self._leader.take_over()

    def steps(self) -> Mapping[str, Step]:
        """What the other workers may ask of this one."""
        return {
            "hold": self._gate.hold,
            "let_in": self._gate.let_in,
            "until_idle": self._gate.until_idle,
            "load": self._gate.load,
            "adopt": self._follower.adopt,
            "latest": self._follower.latest if self._leader is None else self._leader.latest,
            "count": self.metrics.count,
            "show_servers": self._show_servers,
            "submit": self._submit,
        }

    async def _show_servers(self) -> list[dict[str, Any]]:
        return await self._engine.show() if isinstance(self._engine, ServerPool) else []

    async def _submit(self, request: GenerateRequest) -> TokenChunk:
        """Answer a request of another worker by this worker's engine, in one chunk. Raises Unreachable on shutdown."""
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish is not FinishReason.ABORT:
                    return chunk
        raise Unreachable("the leading worker is stopping")
