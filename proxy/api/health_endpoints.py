"""Liveness, readiness and Prometheus metrics."""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.http import JsonResponse
from proxy.engine.gate import Gate
from proxy.engine.interface import ServerPool
from proxy.store.store import Store
from proxy.telemetry.metrics import CONTENT_TYPE, Metrics
from proxy.workers.common_metrics import CommonMetrics


class HealthEndpoints:
    """`/health`, `/ready` and `/metrics`."""

    def __init__(self, gate: Gate, store: Store, metrics: Metrics | CommonMetrics, servers: ServerPool | None) -> None:
        """`metrics`: of this process, or of all workers. `servers`: the engine's server pool; None if it is no pool."""
        self._gate, self._store, self._metrics, self._servers = gate, store, metrics, servers

    async def health(self, request: Request) -> JsonResponse:
        """200 while the process runs."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> JsonResponse:
        """200 if the store answers and the engine runs or is paused. Raises StoreUnavailable or EngineUnavailable."""
        await self._store.ping()
        if self._servers is not None:
            self._servers.check_alive()
        info, paused = self._gate.info(), self._gate.paused
        state = {"status": "ready" if paused is None else "paused", "engine": info.name}
        return JsonResponse({**state, "version": info.weight_version})

    async def metrics(self, request: Request) -> Response:
        """The metrics in Prometheus text format."""
        metrics = self._metrics if isinstance(self._metrics, Metrics) else await self._metrics.total()
        if self._servers is not None:
            metrics.servers = Counter(server["state"] for server in await self._servers.show())
        return Response(metrics.text(), media_type=CONTENT_TYPE)
