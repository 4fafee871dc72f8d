"""A stand-in for E2B: its REST API, and the daemon in its sandboxes (connect RPC, files), as its SDK calls them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from tests.conformance.sandboxes.machines import Machine, Machines, write

KEY = "e2b_key_of_the_test"
_PORT = "49983"


def application(machines: Machines) -> Starlette:
    """The service. Requests without the key, or to the daemon without the token of the sandbox, are refused."""

    def refused(request: Request) -> Response | None:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "no key"}, 401)
        return None

    def of(headers: Any) -> Machine | None:
        name = headers.get("e2b-sandbox-id", "")
        known = headers.get("x-access-token") == f"token-of-{name}" and headers.get("e2b-sandbox-port") == _PORT
        return machines.running.get(name) if known else None

    async def create(request: Request) -> Response:
        if (refusal := refused(request)) is not None:
            return refusal
        if machines.busy:
            machines.busy -= 1
            return JSONResponse({"code": 429, "message": "too many"}, 429, {"Should-Retry": "false"})
        name = machines.create(await request.json())
        about = {"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.6.4"}
        return JSONResponse({**about, "envdAccessToken": f"token-of-{name}"}, 201)

    async def listed(request: Request) -> Response:
        if (refusal := refused(request)) is not None:
            return refusal
        # The SDK quotes the names and values, and then the whole.
        wanted = {unquote(name): unquote(value) for name, value in parse_qsl(request.query_params["metadata"])}
        found = [name for name, each in machines.running.items() if wanted.items() <= each.about["metadata"].items()]
        about = {
            **{"templateID": "base", "clientID": "c", "startedAt": "2026-01-01T00:00:00Z", "state": "running"},
            **{
                "endAt": "2026-01-01T00:00:00Z",
                "cpuCount": 1,
                "memoryMB": 512,
                "diskSizeMB": 1,
                "envdVersion": "0.6.4",
            },
        }
        return JSONResponse([{**about, "sandboxID": name} for name in found])

    async def delete(request: Request) -> Response:
        if (refusal := refused(request)) is not None:
            return refusal
        found = await asyncio.to_thread(machines.delete, request.path_params["name"])
        return Response(status_code=204) if found else JSONResponse({"code": 404, "message": "gone"}, 404)

    async def files(request: Request) -> Response:
        if of(request.headers) is None:
            return JSONResponse({"code": 502, "message": "The sandbox was not found"}, 502)
        path = Path(request.query_params["path"])
        if request.method == "GET":
            return Response(await asyncio.to_thread(path.read_bytes))
        await asyncio.to_thread(write, path, await request.body())
        return JSONResponse([{"name": path.name, "type": "file", "path": str(path)}])

    async def health(request: Request) -> Response:
        return Response(status_code=204 if of(request.headers) else 502)

    daemon = process_connect.ProcessASGIApplication(_Daemon(of))
    return Starlette(
        routes=[
            Route("/v2/sandboxes", create, methods=["POST"]),
            Route("/v2/sandboxes", listed, methods=["GET"]),
            Route("/sandboxes/{name}", delete, methods=["DELETE"]),
            Route("/files", files, methods=["GET", "POST"]),
            Route("/health", health),
            Mount("/", daemon),
        ]
    )


class _Daemon(process_connect.Process):
    """Runs commands, as the daemon in a sandbox does."""

    def __init__(self, of: Any) -> None:
        self._of = of

    async def start(self, request: process_pb.StartRequest, ctx: Any) -> AsyncIterator[process_pb.StartResponse]:
        machine = self._of({name.lower(): value for name, value in ctx.request_headers.items()})
        assert machine is not None
        config = request.process
        assert config is not None
        yield _event("start", process_pb.ProcessEvent.StartEvent(pid=1))
        # Not a login shell: its profile would set this machine's PATH.
        words = [config.cmd, *(word for word in config.args if word != "-l")]
        code, out, err = await asyncio.to_thread(machine.run, words, dict(config.envs))
        data = process_pb.ProcessEvent.DataEvent
        for name, content in (("stdout", out), ("stderr", err)):
            for at in range(0, len(content), 30_000):
                yield _event("data", data(output=Oneof(name, content[at : at + 30_000])))
        end = process_pb.ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit status {code}")
        yield _event("end", end)


def _event(name: Any, value: Any) -> process_pb.StartResponse:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(name, value)))
