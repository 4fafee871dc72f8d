"""Forwards requests that another worker of this server must answer. Requests and answers are passed on unchanged."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from proxy.api.bodies import Bodies, Upload
from proxy.api.connections import while_connected
from proxy.api.headers import headers_of
from proxy.api.http import error_response
from proxy.api.neutral_errors import OUTSIDE
from proxy.telemetry.http_request import request_of
from proxy.workers.leader import LEADER
from proxy.workers.peers import PASSED, PASSED_OUTSIDE, PEER, Peers, Unreachable

_OF_THE_CONNECTION = {b"connection", b"expect", b"keep-alive", b"transfer-encoding", b"upgrade"}
_NOT_ASKED = _OF_THE_CONNECTION | {b"content-length", PEER}  # httpx sets the length
_NOT_ANSWERED = _OF_THE_CONNECTION | {b"date"}  # this worker's server sets it


class Forwarding:
    """Passes requests on to other workers."""

    def __init__(self, peers: Peers, bodies: Bodies) -> None:
        self._peers, self._bodies = peers, bodies

    async def to_leader(self, request: Request) -> Forwarded:
        """The endpoint for paths that only the leader can answer. Raises the errors of `Upload.read`."""
        with self._bodies.upload(request.scope, headers_of(request.scope), request.receive) as upload:
            return self.to(LEADER, await upload.read(), upload)

    def to(self, worker: int, body: bytes, upload: Upload) -> Forwarded:
        """The reply to a request whose body has been read. It keeps the share of `upload` until the answer begins."""
        return Forwarded(self._peers, worker, body, upload.handed_on())


class Forwarded:
    """A reply that another worker writes. If the client leaves, the other worker sees the disconnect."""

    def __init__(self, peers: Peers, worker: int, body: bytes, upload: Upload) -> None:
        self._peers, self._worker, self._body, self._upload = peers, worker, body, upload
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_of(scope).elsewhere = True
        with self._upload, suppress(ClientDisconnect):
            await while_connected(receive, self._pump(scope, receive, send))

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"]
        prefix = PASSED_OUTSIDE if OUTSIDE in scope else PASSED
        target = prefix.encode() + scope["raw_path"] + (b"?" + query if query else b"")
        asked = [(name, value) for name, value in scope["headers"] if name not in _NOT_ASKED]
        asked += [(PEER, "{}:{}".format(*scope["client"]).encode())] if scope.get("client") else []
        try:
            async with self._peers.request(self._worker, scope["method"], target, asked, self._body) as answer:
                self._upload.release()  # a stream may run for minutes
                headers = [(k, v) for k, v in answer.headers.raw if k.lower() not in _NOT_ANSWERED]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                self.started = True
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except Unreachable as error:
            if not self.started:  # else abort: a failed reply must not end like a complete one
                request_of(scope).elsewhere = False
                await error_response(scope, error)(scope, receive, send)
