"""The endpoints of a worker on its private socket: steps for other workers, and requests that they forward."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.connections import while_connected
from proxy.api.headers import headers_of
from proxy.api.neutral_errors import OUTSIDE
from proxy.workers.group import Step
from proxy.workers.peers import PASSED, PASSED_OUTSIDE, PEER, STEP
from tokengrove.errors import ProxyError


class WorkerEndpoints:
    """An ASGI app. It runs `steps` by name under STEP at once, and passes forwarded requests to `app` after joining."""

    def __init__(self, steps: Mapping[str, Step], app: ASGIApp, joined: asyncio.Event) -> None:
        self._steps, self._app, self._joined = steps, app, joined

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, raw_path = scope["path"], scope["raw_path"]
        prefix = next((each for each in (PASSED, PASSED_OUTSIDE) if path.startswith(each)), None)
        if prefix is not None:
            await self._joined.wait()
            asked = {**scope, "path": path.removeprefix(prefix), "raw_path": raw_path.removeprefix(prefix.encode())}
            if prefix is PASSED_OUTSIDE:
                asked[OUTSIDE] = True
            asked["client"] = _client_in(scope)
            await self._app(asked, receive, send)
        else:
            answer = await self._run(path.removeprefix(STEP), Request(scope, receive))
            await answer(scope, receive, send)

    async def _run(self, name: str, request: Request) -> Response:
        """Run a step. It is cancelled if the requesting worker is lost."""
        arguments = pickle.loads(await request.body())
        try:
            result = await while_connected(request.receive, self._steps[name](*arguments))
        except ProxyError as error:
            result = error
        except ClientDisconnect:
            return Response()  # never read
        return Response(pickle.dumps(result))


def _client_in(scope: Scope) -> tuple[str, int] | None:
    """The address of the client whose request was forwarded."""
    host, _, port = headers_of(scope).get(PEER, "").rpartition(":")
    return (host, int(port)) if host else None
