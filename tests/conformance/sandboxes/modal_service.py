"""A stand-in for Modal: its control plane, and the command router of its workers, as its SDK calls them over gRPC."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.conformance.sandboxes.machines import Machines

KEY = ("ak-of-the-test", "as-of-the-test")
NEVER_ANSWERS = "an-image-whose-creation-is-not-answered"
T = TypeVar("T")
Handler = Callable[[Any], Coroutine[Any, Any, None]]
_CHUNK = 30_000
_images: dict[str, list[str]] = {}
"""The commands of images by their ids, for all tests of a process: the SDK keeps the id of its default image."""


def _token(subject: str) -> str:
    """A JWT of a subject, without a signature, that expires in the year 2100."""
    claims = json.dumps({"sub": subject, "exp": 4102444800}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.none"


class _Service:
    """Calls the methods that a subclass has; all others of the generated service are refused."""

    def __getattr__(self, name: str) -> Handler:
        if not name[0].isupper():
            raise AttributeError(name)

        async def refused(stream: Any) -> None:
            raise GRPCError(Status.UNIMPLEMENTED, f"the stand-in has no {name}")

        return refused


def _unary(answer: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
    """A handler, from a method that returns the answer to a request."""

    async def handler(self: Any, stream: Any) -> None:
        request = await stream.recv_message()
        self.check(request, stream.metadata, answer.__name__)
        await stream.send_message(await answer(self, request))

    return handler


class _ControlPlane(_Service):
    """Apps, images and sandboxes. Requests without the key are refused, as is a second sandbox with the same name."""

    __mapping__ = ModalClientBase.__mapping__

    def __init__(self, machines: Machines, url: str) -> None:
        self._machines, self._url = machines, url

    def check(self, request: Any, metadata: Any, method: str) -> None:
        if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != KEY:
            raise GRPCError(Status.UNAUTHENTICATED, "no key")
        if method.endswith("V2") and metadata.get("x-modal-auth-token") != _token("client"):
            raise GRPCError(Status.UNAUTHENTICATED, "no token")

    def _named(self, app: str, name: str) -> str | None:
        found = self._machines.running.items()
        return next((key for key, it in found if (it.about["app"], it.about["name"]) == (app, name)), None)

    @_unary
    async def AuthTokenGet(self, request: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=_token("client"))

    @_unary
    async def AppGetOrCreate(self, request: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    @_unary
    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata)

    @_unary
    async def ImageGetOrCreate(self, request: Any) -> Any:
        name = f"im-{len(_images)}"
        _images[name] = list(request.image.dockerfile_commands)
        built = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id=name, result=built)

    @_unary
    async def ImageGetByTag(self, request: Any) -> Any:
        _images["im-published"] = [request.tag]
        return api_pb2.ImageGetByTagResponse(image_id="im-published")

    @_unary
    async def SandboxCreateV2(self, request: Any) -> Any:
        machines, asked = self._machines, request.definition
        if machines.busy:
            machines.busy -= 1
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "too many")
        app = request.app_id.removeprefix("ap-")
        if self._named(app, asked.name):
            raise GRPCError(Status.ALREADY_EXISTS, "the name is in use")
        about = {
            **{"app": app, "name": asked.name, "timeout": asked.timeout_secs, "image": _images[asked.image_id]},
            **{"labels": {tag.tag_name: tag.tag_value for tag in request.tags}, "resources": asked.resources},
            **{"command": list(asked.entrypoint_args), "created": len(machines.asked) + 1},
        }
        name = machines.create(about)
        if about["image"][0] == f"FROM {NEVER_ANSWERS}":
            await asyncio.Event().wait()
        return api_pb2.SandboxCreateV2Response(sandbox_id=f"sb-{name}", task_id=f"ta-{name}")

    @_unary
    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        name = self._named(request.app_name, request.sandbox_name)
        if name is None:
            raise GRPCError(Status.NOT_FOUND, "there is no such sandbox")
        return api_pb2.SandboxGetFromNameResponse(sandbox_id=f"sb-{name}")

    @_unary
    async def SandboxGetFromName(self, request: Any) -> Any:
        raise GRPCError(Status.NOT_FOUND, "there is no such sandbox of the first version")

    @_unary
    async def SandboxGetTaskIdV2(self, request: Any) -> Any:
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{request.sandbox_id.removeprefix('sb-')}")

    @_unary
    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:
        name = request.sandbox_id.removeprefix("sb-")
        if name not in self._machines.running:
            raise GRPCError(Status.NOT_FOUND, "there is no such sandbox")
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self._url, jwt=_token(f"ta-{name}"))

    @_unary
    async def SandboxListV2(self, request: Any) -> Any:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}.items()
        before = request.before_timestamp or float("inf")
        found = {
            name: each.about["created"]
            for name, each in self._machines.running.items()
            if wanted <= each.about["labels"].items() and request.app_id == f"ap-{each.about['app']}"
        }
        newest = sorted(((at, name) for name, at in found.items() if at < before), reverse=True)[:1]  # one a page
        pages = [api_pb2.SandboxInfo(id=f"sb-{name}", created_at=at) for at, name in newest]
        return api_pb2.SandboxListResponse(sandboxes=pages)

    @_unary
    async def SandboxTerminateV2(self, request: Any) -> Any:
        if not await asyncio.to_thread(self._machines.delete, request.sandbox_id.removeprefix("sb-")):
            raise GRPCError(Status.NOT_FOUND, "there is no such sandbox")
        return api_pb2.SandboxTerminateResponse()


class _Command:
    """A command that was started. `outputs`: its stdout and stderr. `written`: how many bytes of its input it has."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self.written = process, 0
        self.outputs = [asyncio.create_task(each.read()) for each in (process.stdout, process.stderr)]


class _Router(_Service):
    """Runs commands, as the worker of a sandbox does. Requests without the token of the sandbox are refused."""

    __mapping__ = TaskCommandRouterBase.__mapping__

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._commands: dict[str, _Command] = {}

    def check(self, request: Any, metadata: Any, method: str) -> None:
        if metadata.get("authorization") != f"Bearer {_token(request.task_id)}":
            raise GRPCError(Status.UNAUTHENTICATED, "no token of this sandbox")
        if request.task_id.removeprefix("ta-") not in self._machines.running:
            raise GRPCError(Status.NOT_FOUND, "there is no such sandbox")

    @_unary
    async def TaskExecStart(self, request: Any) -> Any:
        machine = self._machines.running[request.task_id.removeprefix("ta-")]
        if request.exec_id not in self._commands:
            self._commands[request.exec_id] = _Command(await machine.start(request.command_args))
        return router_pb2.TaskExecStartResponse()

    @_unary
    async def TaskExecStdinWrite(self, request: Any) -> Any:
        command = self._commands[request.exec_id]
        assert command.process.stdin is not None
        assert request.offset == command.written
        try:
            command.process.stdin.write(request.data)
            await command.process.stdin.drain()
        except ConnectionError:
            raise GRPCError(Status.FAILED_PRECONDITION, "the command does not read its input") from None
        command.written += len(request.data)
        return router_pb2.TaskExecStdinWriteResponse()

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.check(request, stream.metadata, "TaskExecStdioRead")
        stdout = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        content = await asyncio.shield(self._commands[request.exec_id].outputs[0 if stdout else 1])
        for at in range(request.offset, len(content), _CHUNK):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=content[at : at + _CHUNK]))

    @_unary
    async def TaskExecWait(self, request: Any) -> Any:
        code = await self._commands[request.exec_id].process.wait()
        return router_pb2.TaskExecWaitResponse(**({"code": code} if code >= 0 else {"signal": -code}))


@contextlib.contextmanager
def served(machines: Machines) -> Iterator[str]:
    """The control plane and the router on one free port of this machine; yields its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def there(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def begin() -> tuple[Server, str]:
        listening = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = Server([_ControlPlane(machines, url), _Router(machines)])
        await server.start(sock=listening)
        return server, url

    async def end() -> None:
        server.close()
        await server.wait_closed()

    server, url = there(begin())
    yield url
    there(end())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
