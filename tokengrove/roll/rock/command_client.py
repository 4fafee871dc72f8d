"""Calls of a server in a sandbox that is reachable only by commands and files: each call is a command there."""

from __future__ import annotations

import json
import uuid
from typing import TypeVar

import httpx

from tokengrove.client.operations import Call, Steps
from tokengrove.client.transport import TIMEOUT_S, Connection, decode
from tokengrove.client.unreachable import ServerUnreachable
from tokengrove.client.values import Json
from tokengrove.rollout.sandboxes.sandbox import Sandbox

T = TypeVar("T")

_PROGRAM = """
import json, os, sys, urllib.error, urllib.request
path = sys.argv[1]
with open(path) as file:
    call = json.load(file)
os.remove(path)
body = None if call["body"] is None else call["body"].encode()
request = urllib.request.Request(call["url"], body, call["headers"], method=call["method"])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(request, timeout=call["timeout"]) as answer:
        status, content = answer.status, answer.read()
except urllib.error.HTTPError as error:
    status, content = error.code, error.read()
with open(path + ".answer", "wb") as file:
    file.write(b"%d\\n" % status + content)
"""


class CommandClient(Connection):
    """Sends the calls of `client.operations` with `python3` in a sandbox. `url`: the server's address there."""

    def __init__(self, sandbox: Sandbox, url: str, admin_key: str | None = None) -> None:
        super().__init__(url, admin_key, TIMEOUT_S)
        self._sandbox = sandbox

    async def run(self, steps: Steps[T]) -> T:
        """Send the calls of an operation; return its result. Raises the server's errors, and ServerUnreachable."""
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._send(call))
        except StopIteration as end:
            result: T = end.value
            return result

    async def aclose(self) -> None:
        """Do nothing: no connection is kept open."""

    async def _send(self, call: Call) -> Json:
        sent = self.arguments(call)
        path = f"{self._sandbox.scratch_folder}/call-{uuid.uuid4().hex}"
        content = sent["content"]
        told = {
            "url": sent["url"],
            "method": sent["method"],
            "headers": sent["headers"],
            "body": None if content is None else content.decode(),
            "timeout": sent["timeout"].read,
        }
        await self._sandbox.upload(path, json.dumps(told).encode())
        ended = await self._sandbox.run(["python3", "-c", _PROGRAM, path], timeout_s=told["timeout"] + TIMEOUT_S)
        if ended.exit_code:
            raise ServerUnreachable(f"no answer from {self.url} in the sandbox: {ended.output[-500:].strip()}")
        status, _, body = (await self._sandbox.download(f"{path}.answer")).partition(b"\n")
        await self._sandbox.run(["rm", "-f", f"{path}.answer"])
        return decode(httpx.Response(int(status), content=body, request=httpx.Request(call.method, self.url)), call.raw)
