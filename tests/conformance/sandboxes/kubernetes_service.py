"""A stand-in for the API server of a Kubernetes cluster: pods, commands in them over websockets, claims of sandboxes.

A claim of agent-sandbox gets a sandbox of another name, as from a warm pool, and its pod has a name of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.conformance.sandboxes.machines import Machine, Machines

KEY = "a-token-of-the-cluster"
PROTOCOL = "v4.channel.k8s.io"


def application(machines: Machines) -> Starlette:
    """The API server. A pod is pending when it is first read, and ready then."""
    read: set[str] = set()

    def refused(request: Any) -> bool:
        return str(request.headers.get("authorization")) != f"Bearer {KEY}"

    def status(code: int, message: str) -> Response:
        return JSONResponse({"kind": "Status", "status": "Failure", "message": message, "code": code}, code)

    def named(name: str, namespace: str) -> str | None:
        found = ((key, each.about) for key, each in machines.running.items())
        return next((key for key, it in found if name in it["names"] and it["namespace"] == namespace), None)

    def pod(about: dict[str, Any], ready: bool) -> dict[str, Any]:
        state = {"running": {}} if ready else {"waiting": {"reason": "ContainerCreating"}}
        container = {"name": "sandbox", "ready": ready, "state": state, "image": "i", "imageID": "", "restartCount": 0}
        return {
            "metadata": about["pod"]["metadata"],
            "spec": about["pod"]["spec"],
            "status": {"phase": "Running" if ready else "Pending", "containerStatuses": [container]},
        }

    async def pods(request: Request) -> Response:
        if refused(request):
            return status(401, "no token")
        namespace = request.path_params["namespace"]
        if request.method == "GET":
            label, _, value = request.query_params["labelSelector"].partition("=")
            found = [each.about for each in machines.running.values() if each.about["namespace"] == namespace]
            items = [pod(it, True) for it in found if it["pod"]["metadata"]["labels"].get(label) == value]
            return JSONResponse({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
        if machines.busy:
            machines.busy -= 1
            return status(429, "too many")
        asked = await request.json()
        name = asked["metadata"]["name"]
        if named(name, namespace):
            return status(409, "it exists")
        about = {"pod": asked, "names": [name], "namespace": namespace}
        machines.create(about)
        return JSONResponse(pod(about, False), 201)

    async def one(request: Request) -> Response:
        if refused(request):
            return status(401, "no token")
        key = named(request.path_params["name"], request.path_params["namespace"])
        if key is None:
            return status(404, "there is no such pod")
        about = machines.running[key].about
        if request.method == "DELETE":
            assert request.query_params["gracePeriodSeconds"] == "0"
            await asyncio.to_thread(machines.delete, key)
            return JSONResponse(pod(about, False))
        ready = key in read
        read.add(key)
        return JSONResponse(pod(about, ready))

    async def execute(socket: WebSocket) -> None:
        key = named(socket.path_params["name"], socket.path_params["namespace"])
        right = key is None or socket.query_params.get("container") == machines.running[key].about.get(
            "container", "sandbox"
        )
        if key is None or refused(socket) or not right:
            await socket.close()  # before it is accepted: the client is told that there is no such thing
            return
        await socket.accept(subprotocol=PROTOCOL)
        with contextlib.suppress(WebSocketDisconnect):
            await _run(socket, machines.running[key], socket.query_params.getlist("command"))
            await socket.close()

    async def claims(request: Request) -> Response:
        if refused(request):
            return status(401, "no token")
        namespace = request.path_params["namespace"]
        if request.method == "GET":
            label, _, value = request.query_params["labelSelector"].partition("=")
            found = [each.about["pod"] for each in machines.running.values() if each.about["namespace"] == namespace]
            return JSONResponse({"items": [it for it in found if it["metadata"]["labels"].get(label) == value]})
        if machines.busy:
            machines.busy -= 1
            return status(429, "too many")
        asked = await request.json()
        name = asked["metadata"]["name"]
        assert asked["spec"]["warmPoolRef"] == {"name": "pool"}
        if named(name, namespace):
            return status(409, "it exists")
        names = [name, f"pool-{name[-8:]}", f"pod-{name[-8:]}"]
        machines.create({"pod": asked, "names": names, "namespace": namespace, "container": None})
        return JSONResponse(asked, 201)

    async def claim(request: Request) -> Response:
        key = named(request.path_params["name"], request.path_params["namespace"])
        if key is None or refused(request):
            return status(404, "there is no such claim")
        about = machines.running[key].about
        if request.method == "DELETE":
            await asyncio.to_thread(machines.delete, key)
            return JSONResponse({"kind": "Status", "status": "Success"})
        if request.path_params["kind"] == "sandboxes":
            return JSONResponse({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": about["names"][2]}}})
        ready = key in read
        read.add(key)
        condition = {"type": "Ready", "status": str(ready), "reason": "SandboxNotReady", "message": "it starts"}
        told = {"conditions": [condition], "sandbox": {"name": about["names"][1]}}
        return JSONResponse({**about["pod"], "status": told})

    group = "/apis/{group}/v1beta1/namespaces/{namespace}"
    start = "/api/v1/namespaces/{namespace}/pods"
    return Starlette(
        routes=[
            Route(start, pods, methods=["GET", "POST"]),
            Route(f"{start}/{{name}}", one, methods=["GET", "DELETE"]),
            Route(f"{group}/sandboxclaims", claims, methods=["GET", "POST"]),
            Route(f"{group}/{{kind}}/{{name}}", claim, methods=["GET", "DELETE"]),
            WebSocketRoute(f"{start}/{{name}}/exec", execute),
        ]
    )


async def _run(socket: WebSocket, machine: Machine, words: list[str]) -> None:
    """Run a command whose input and outputs are the channels 0, 1 and 2; its end is told in channel 3."""
    process = await machine.start(words)
    assert process.stdin is not None

    async def feed() -> None:
        """The input has no end: the protocol does not tell it."""
        assert process.stdin is not None
        with contextlib.suppress(WebSocketDisconnect, ConnectionError):
            while True:
                frame = await socket.receive_bytes()
                assert frame[0] == 0
                process.stdin.write(frame[1:])
                await process.stdin.drain()

    async def tell(channel: int, stream: Any) -> None:
        while data := await stream.read(30_000):
            await socket.send_bytes(bytes([channel]) + data)

    feeding = asyncio.create_task(feed())
    await asyncio.gather(tell(1, process.stdout), tell(2, process.stderr))
    code = await process.wait()
    feeding.cancel()
    told: dict[str, Any] = {"status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        told = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
    await socket.send_bytes(b"\x03" + json.dumps(told).encode())
