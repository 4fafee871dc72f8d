"""Turns as HTTP replies. The end is written only after the commit, and a leaving client is noticed at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from proxy.api.http import JsonResponse, error_response
from proxy.errors import ProxyError
from proxy.protocols.base import StreamEncoder, WireProtocol
from proxy.protocols.sse import CONTENT_TYPE
from proxy.turn import Turn
from proxy.turns import Turns
from proxy.types import Delta

# Codex gives a silent stream up after 300 s, proxies in between often after 30 to 60.
KEEPALIVE_S = 5.0


class UnaryReply:
    """Waits for the committed turn and answers in one body."""

    def __init__(self, request: Request, turns: Turns, turn: Turn, protocol: WireProtocol) -> None:
        self._request, self._turns, self._turn, self._protocol = request, turns, turn, protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn = self._turn
        assert turn.task is not None
        self._turns.join(turn)
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((turn.task, gone), return_when=asyncio.FIRST_COMPLETED)
            if turn.task.done():
                await self._answer(turn)(scope, receive, send)
                self._written(turn)
        finally:
            gone.cancel()
            self._turns.leave(turn)

    def _answer(self, turn: Turn) -> JsonResponse:
        assert turn.task is not None
        try:
            interaction = turn.task.result()
        except ProxyError as error:
            response = error_response(self._request, error)
            assert isinstance(response, JsonResponse)
            return response
        return JsonResponse(self._protocol.reply(turn.request, interaction))

    def _written(self, turn: Turn) -> None:
        assert turn.task is not None
        if turn.task.exception() is None:
            self._turns.replied(turn.interaction)


class StreamReply:
    """Sends events as tokens come. Built by `open`, which waits for the first of them: early failures stay statuses."""

    def __init__(
        self, turns: Turns, turn: Turn, encoder: StreamEncoder, batches: AsyncIterator[list[Delta]], first: list[Delta]
    ) -> None:
        self._turns, self._turn, self._encoder = turns, turn, encoder
        self._batches, self._first = batches, first

    @classmethod
    async def open(cls, turns: Turns, turn: Turn, protocol: WireProtocol) -> StreamReply:
        """A reply whose first deltas (or first silence) are here. Raises the ProxyError that ended the turn before."""
        turns.join(turn)
        try:
            batches = turn.stream(KEEPALIVE_S)
            first: list[Delta] = await anext(batches, [])
        except BaseException:
            turns.leave(turn)
            raise
        encoder = protocol.stream(turn.request, turn.interaction.id, int(turn.interaction.created_at))
        return cls(turns, turn, encoder, batches, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            gone.cancel()
            pump.cancel()
            self._turns.leave(self._turn)

    async def _pump(self, send: Send) -> None:
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_body(self._encoder.start() + self._encode(self._first)))
        try:
            async for batch in self._batches:
                await send(_body(self._encode(batch)))
        except ProxyError as error:
            await send(_body(self._encoder.error(error), more=False))
            return
        await send(_body(self._encoder.finish(self._turn.interaction), more=False))
        self._turns.replied(self._turn.interaction)

    def _encode(self, batch: list[Delta]) -> bytes:
        return b"".join(map(self._encoder.delta, batch)) if batch else self._encoder.keepalive()


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
