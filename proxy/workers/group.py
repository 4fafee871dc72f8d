"""One worker among the others: its place, and its communication with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from proxy.engine.admin import EngineAdmin
from proxy.engine.chunks import TokenChunk
from proxy.engine.gate import Gate
from proxy.engine.interface import Engine, ServerPool, SharedEngine
from proxy.engine.mailbox import Mailbox
from proxy.engine.requests import GenerateRequest
from proxy.telemetry.metrics import Metrics
from proxy.workers.attempt_table import AttemptTable, WorkerAttempts
from proxy.workers.common_live import CommonLive, Since
from proxy.workers.common_metrics import CommonMetrics
from proxy.workers.leader import LEADER, CommonPool, Follower, Gates, Leader, show_servers
from proxy.workers.mailbox_client import MailboxClient
from proxy.workers.peers import Peers, Unreachable
from tokengrove.errors import ConfigurationError
from tokengrove.reasons import FinishReason

Step = Callable[..., Awaitable[Any]]


class Place:
    """The place of a worker among the others. `number`: counted from 0. `folder`: the folder with all sockets."""

    def __init__(self, number: int, table: AttemptTable, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.peers, self.attempts = Peers(folder, number, table.workers), WorkerAttempts(table, number)

    @property
    def leads(self) -> bool:
        """True for the worker that administers the engine."""
        return self.number == LEADER

    def share(self, engine: Engine) -> SharedEngine:
        """The engine that this worker shares with the others. Raises ConfigurationError if it cannot be shared."""
        if isinstance(engine, Mailbox) and not self.leads:
            info = engine.info()
            return MailboxClient(info.vocab_size, info.context_length, self.peers)
        if not isinstance(engine, SharedEngine):
            raise ConfigurationError("--workers: this engine belongs to one process")
        return engine


class Group:
    """The communication of the worker at `place` with the others about its engine, its gate and its metrics."""

    def __init__(self, place: Place, engine: SharedEngine, gate: Gate, metrics: Metrics, changed: Since) -> None:
        self._peers, self._engine, self._gate = place.peers, engine, gate
        engine.leads = False
        self.joined = asyncio.Event()
        self.metrics = CommonMetrics(metrics, place.peers, place.folder)
        self.live = CommonLive(metrics.history, changed, place.peers)
        self._follower = Follower(engine, gate)
        gates = Gates(gate, place.peers)
        self._leader = Leader(engine, gates, self._follower, place.peers, metrics.engine) if place.leads else None

    @property
    def admin(self) -> EngineAdmin | None:
        """The administration of the engine for all workers, on the leading worker, else None."""
        return None if self._leader is None else self._leader.admin

    @property
    def pool(self) -> ServerPool | None:
        """The pool of engine servers of all workers, on the leading worker, else None."""
        if self._leader is None or not isinstance(self._engine, ServerPool):
            return None
        return CommonPool(self._engine, self._leader, self._peers)

    async def servers(self) -> list[dict[str, Any]]:
        """The engine servers as this worker sees them, with the summed numbers of all workers; empty without a pool."""
        return await show_servers(self._engine, self._peers) if isinstance(self._engine, ServerPool) else []

    async def catch_up(self) -> None:
        """Adopt the newest state of the other workers. Call it before the engine starts."""
        await self._follower.catch_up(self._peers)

    async def join(self) -> None:
        """Join the others, once the engine has started. Sets `joined`: this worker then answers forwarded requests."""
        if self._leader is not None:
            await self._leader.take_over()
        self.joined.set()

    def steps(self) -> Mapping[str, Step]:
        """The steps that other workers may call on this worker."""
        return {
            "hold": self._gate.hold,
            "let_in": self._gate.let_in,
            "until_idle": self._gate.until_idle,
            "load": self._gate.load,
            "held": self._follower.held,
            "adopt": self._follower.adopt,
            "latest": self._follower.latest if self._leader is None else self._leader.latest,
            "count": self.metrics.count,
            "show_servers": self._show_servers,
            "samples": self.live.own_samples,
            "changed": self.live.own_changed,
            "submit": self._submit,
        }

    async def _show_servers(self) -> list[dict[str, Any]]:
        return await self._engine.show() if isinstance(self._engine, ServerPool) else []

    async def _submit(self, request: GenerateRequest) -> TokenChunk:
        """Sample a request of another worker on this worker's engine, in one chunk. Raises Unreachable on shutdown."""
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish is not FinishReason.ABORT:
                    return chunk
        raise Unreachable("the leading worker is stopping")
