"""Liveness, readiness and Prometheus metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.http import JsonResponse, key_of
from proxy.engine.gate import Gate
from proxy.engine.interface import ServerPool
from proxy.sessions.keys import KeySet, hash_key
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.telemetry.metrics import Metrics, Snapshot
from tokengrove.errors import NotFound, Unauthorized


class HealthEndpoints:
    """`/health`, `/ready` and `/metrics`."""

    def __init__(
        self,
        gate: Gate,
        store: Store,
        metrics: Metrics,
        numbers: Callable[[], Awaitable[Snapshot]],
        servers: ServerPool | None,
        settings: Settings,
    ) -> None:
        """`numbers` reads the metrics of this process, or of all workers. `servers`: the pool, if the engine is one."""
        self._gate, self._store, self._servers = gate, store, servers
        self._metrics, self._numbers = metrics, numbers
        self._port = settings.metrics_port
        self._keys = [KeySet(settings.metrics_key), KeySet(settings.admin_key)] if settings.metrics_key else []

    async def health(self, request: Request) -> JsonResponse:
        """200 while the process runs."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> JsonResponse:
        """200 if the store answers, or calls wait for it, and the engine runs or is paused.

        Raises StoreUnavailable or EngineUnavailable.
        """
        database = "ready" if await self._store.ping() else "away"
        self._gate.check_alive()
        if self._servers is not None:
            self._servers.check_alive()
        info, paused = self._gate.info(), self._gate.state.paused
        state = {"status": "ready" if paused is None else "paused", "engine": info.name, "database": database}
        return JsonResponse({**state, "version": info.weight_version})

    async def metrics(self, request: Request) -> Response:
        """The metrics as Prometheus or OpenMetrics text, depending on `Accept`. Raises Unauthorized and NotFound."""
        if self._port is not None and _port_of(request) != self._port:
            raise NotFound(f"/metrics is at port {self._port} of this server (--metrics-port)")
        self._check_key(key_of(request))
        backlog = await self._store.backlog.read()
        self._metrics.sessions.see(backlog, time.time(), up=backlog is not None and not self._store.refused)
        numbers, accept = await self._numbers(), request.headers.get("accept", "")
        text, media_type = await asyncio.to_thread(self._metrics.text, numbers, accept)  # takes about 10 ms
        return Response(text, headers={"content-type": media_type})

    def _check_key(self, key: str | None) -> None:
        digest = hash_key(key or "")
        if self._keys and not any([keys.holds(digest) for keys in self._keys]):
            raise Unauthorized("/metrics needs its key or the admin key (--metrics-key): Authorization: Bearer KEY")


def _port_of(request: Request) -> int | None:
    """The server port that the client connected to."""
    server = request.scope.get("server")
    return None if server is None else server[1]
