"""A stand-in for Daytona: its REST API, and the toolbox of its sandboxes, as its SDK calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from email.message import Message
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.conformance.sandboxes.machines import Machine, Machines, write

KEY = "dtn_key_of_the_test"
Handler = Callable[[Request], Awaitable[Response]]


def application(machines: Machines) -> Starlette:
    """The service. Requests without the key are refused, as is a second sandbox with the same name."""

    def about(name: str, request: Request) -> dict[str, Any]:
        asked = machines.running[name].about
        return {
            **{"id": name, "organizationId": "o", "name": asked["name"], "user": "daytona", "env": {}},
            **{"labels": asked["labels"], "public": False, "networkBlockAll": False, "kvm": False, "target": "us"},
            **{"cpu": 1, "gpu": 0, "memory": 1, "disk": 3, "state": "started"},
            "toolboxProxyUrl": f"{request.base_url}toolbox",
        }

    def known(handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            if request.headers.get("authorization") != f"Bearer {KEY}":
                return JSONResponse({"message": "no key", "statusCode": 401}, 401)
            return await handler(request)

        return checked

    def named(request: Request) -> str | None:
        wanted = request.path_params["name"]
        return next((name for name, each in machines.running.items() if wanted in (name, each.about["name"])), None)

    def missing() -> Response:
        return JSONResponse({"message": "there is no such sandbox", "statusCode": 404}, 404)

    async def create(request: Request) -> Response:
        asked = await request.json()
        if machines.busy:
            machines.busy -= 1
            return JSONResponse({"message": "too many", "statusCode": 429}, 429)
        if any(each.about["name"] == asked["name"] for each in machines.running.values()):
            return JSONResponse({"message": "the name is in use", "statusCode": 409}, 409)
        return JSONResponse(about(machines.create(asked), request))

    async def listed(request: Request) -> Response:
        wanted = json.loads(request.query_params["labels"])
        found = [name for name, each in machines.running.items() if wanted.items() <= each.about["labels"].items()]
        return JSONResponse({"items": [about(name, request) for name in found], "nextCursor": None})

    async def one(request: Request) -> Response:
        name = named(request)
        return missing() if name is None else JSONResponse(about(name, request))

    async def delete(request: Request) -> Response:
        name = named(request)
        if name is None:
            return missing()
        told = {**about(name, request), "state": "destroyed"}
        await asyncio.to_thread(machines.delete, name)
        return JSONResponse(told)

    async def preview(request: Request) -> Response:
        port, name = int(request.path_params["port"]), request.path_params["name"]
        return JSONResponse({"sandboxId": name, "port": port, "token": "t", "url": f"https://{port}-t.example"})

    def of(request: Request) -> Machine | None:
        return machines.running.get(request.path_params["name"])

    async def execute(request: Request) -> Response:
        machine, asked = of(request), await request.json()
        if machine is None:
            return missing()
        code, out, err = await asyncio.to_thread(
            machine.run, ["/bin/sh", "-c", asked["command"]], asked.get("envs") or {}
        )
        return JSONResponse({"exitCode": code, "result": (out + err).decode()})

    async def upload(request: Request) -> Response:
        if of(request) is None:
            return missing()
        async with request.form() as form:
            file: Any = form["files[0].file"]
            await asyncio.to_thread(write, Path(str(form["files[0].path"])), await file.read())
        return Response()

    async def download(request: Request) -> Response:
        if of(request) is None:
            return missing()
        (path,) = (await request.json())["paths"]
        disposition = Message()
        disposition.add_header("Content-Disposition", "form-data", name="file", filename=path)
        head = f"--of-the-parts\r\nContent-Disposition: {disposition['Content-Disposition']}\r\n\r\n".encode()
        body = head + await asyncio.to_thread(Path(path).read_bytes) + b"\r\n--of-the-parts--\r\n"
        return Response(body, media_type="multipart/form-data; boundary=of-the-parts")

    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/api/sandbox", create),
        ("GET", "/api/sandbox", listed),
        ("GET", "/api/sandbox/{name}", one),
        ("DELETE", "/api/sandbox/{name}", delete),
        ("GET", "/api/sandbox/{name}/ports/{port}/signed-preview-url", preview),
        ("POST", "/toolbox/{name}/process/execute", execute),
        ("POST", "/toolbox/{name}/files/bulk-upload", upload),
        ("POST", "/toolbox/{name}/files/bulk-download", download),
    ]
    return Starlette(routes=[Route(path, known(handler), methods=[method]) for method, path, handler in routes])
