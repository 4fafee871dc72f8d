"""Calls between workers, over a Unix socket of each worker in a folder that only this user can open.

Arguments and results are pickled, since both ends are the same program of the same user. A worker that is dead or still
starting is skipped by `ask_all`, and raises Unreachable in `ask`.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokengrove.errors import EngineUnavailable, ProxyError

if TYPE_CHECKING:
    import httpx

STEP, PASSED, PASSED_OUTSIDE = "/step/", "/request", "/outside"
"""The prefixes of paths: of a call, of a client's request that a worker forwards, and of one from outside.

The client chooses the rest of a forwarded path, so only the prefixes distinguish them. This matters because the body of
a call is unpickled."""
PEER = b"x-tokengrove-peer"
"""The header of a forwarded request with HOST:PORT of its client."""

_CONNECT_S = 5.0


class Unreachable(EngineUnavailable):
    """The other worker is dead, still starting, or does not answer in time."""


class Peers:
    """The other workers, as worker `number` sees them. `folder`: the folder with the sockets."""

    def __init__(self, folder: Path, number: int, workers: int) -> None:
        self.number = number
        self._folder = folder
        self._others = [other for other in range(workers) if other != number]

    def address(self) -> str:
        """The path of this worker's own socket."""
        return self._path(self.number)

    async def ask(self, worker: int, step: str, *arguments: Any) -> Any:
        """Call `step` on another worker. Raises Unreachable, or the ProxyError that the step raises there."""
        target = (STEP + step).encode()
        async with self.request(worker, "POST", target, (), pickle.dumps(arguments)) as response:
            result = pickle.loads(await response.aread())
        if isinstance(result, ProxyError):
            raise result
        return result

    async def ask_all(self, step: str, *arguments: Any, limit_s: float | None = None) -> list[Any]:
        """Call `step` on all other workers concurrently; return the results of those that answer within `limit_s`."""
        calls = (self._ask_within(limit_s, worker, step, *arguments) for worker in self._others)
        results = await asyncio.gather(*calls, return_exceptions=True)
        reached = [result for result in results if not isinstance(result, Unreachable)]
        for result in reached:
            if isinstance(result, BaseException):
                raise result
        return reached

    async def _ask_within(self, limit_s: float | None, worker: int, step: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await self.ask(worker, step, *arguments)
        except TimeoutError:
            raise Unreachable(f"worker {worker} of this server does not answer within {limit_s:g} s") from None

    @asynccontextmanager
    async def request(
        self, worker: int, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[httpx.Response]:
        """Send an HTTP request to another worker. `target`: STEP or PASSED, then path and query.

        `headers`: as in an ASGI scope. Raises Unreachable, also if the answer is incomplete.
        """
        import httpx  # not imported in a server without workers

        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        # Without TLS there is no certificate to verify. The default would load the system's certificates, in 20 ms.
        transport = httpx.AsyncHTTPTransport(uds=self._path(worker), verify=False)
        try:
            async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
                url = httpx.URL("http://worker").copy_with(raw_path=target)
                request = httpx.Request(method, url, headers=list(headers), content=body)
                response = await client.send(request, stream=True)
                try:
                    yield response
                finally:
                    await response.aclose()
        except httpx.TransportError:
            raise Unreachable(
                f"worker {worker} of this server has stopped and is being started again", retry_after_s=1.0
            ) from None

    def _path(self, worker: int) -> str:
        return str(self._folder / f"worker-{worker}.sock")
