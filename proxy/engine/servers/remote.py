"""One engine server as the pool sees it: an engine that can be probed, and may be gone."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from proxy.engine.interface import Engine


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine behind a URL. Every call may raise EngineLost."""

    url: str

    @property
    def world_size(self) -> int:
        """The number of processes that hold weights: the ranks that the server takes in a weight transfer group."""

    async def check(self) -> int:
        """Raise EngineLost unless the server is there; the weight version that it serves."""

    def cut(self) -> None:
        """Break every reply under way, whether the server still answers or not: each raises EngineLost."""
