"""HTTP replies of turns, unary or streamed. The end is written only after the commit; a disconnect ends the reply."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from proxy.api.connections import disconnected, while_connected
from proxy.api.http import JsonResponse, error_response
from proxy.errors import ProxyError
from proxy.protocols.sse import CONTENT_TYPE
from proxy.protocols.wire_protocol import StreamEncoder, WireProtocol
from proxy.rendering.deltas import Delta
from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.turns.choice import Choice
from proxy.turns.turns import Turns
from proxy.types import Api, TurnRequest

# Codex abandons a silent stream after 300 s, reverse proxies often after 30 to 60 s.
KEEPALIVE_S = 5.0
Batch = list[tuple[int, Delta]]
"""Deltas, each with the index of its choice."""
Batches = AsyncIterator[Batch]


class UnaryReply:
    """Waits until all choices are committed, then answers in one body."""

    def __init__(
        self, request: Request, turns: Turns, asked: TurnRequest, choices: Sequence[Choice], protocol: WireProtocol
    ) -> None:
        self._request, self._turns, self._choices = request, turns, choices
        self._reply = functools.partial(protocol.reply, asked)
        self._attempt = choices[0].attempt
        self._headers = request_id_header(protocol.api, choices[0].interaction.id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _joined(self._turns, self._attempt):
            gone = asyncio.ensure_future(disconnected(receive))
            try:
                if await self._all_done(gone):
                    answer = self._answer()
                    await answer(scope, receive, send)
                    if answer.status_code == 200:
                        self._turns.replied(self._attempt)
            finally:
                gone.cancel()

    async def _all_done(self, gone: asyncio.Future[None]) -> bool:
        """Whether every choice ended before the client left."""
        for choice in self._choices:
            await asyncio.wait((choice.ended, gone), return_when=asyncio.FIRST_COMPLETED)
            if not choice.ended.done():
                return False
        return True

    def _answer(self) -> Response:
        try:
            answers = [choice.answer() for choice in self._choices]
        except ProxyError as error:
            return error_response(self._request, error)
        return JsonResponse(self._reply(answers), headers=self._headers)


class StreamReply:
    """Streams events as tokens arrive. `open` waits for the first, so that an early failure has its HTTP status."""

    def __init__(
        self, turns: Turns, choices: Sequence[Choice], encoder: StreamEncoder, batches: Batches, first: Batch
    ) -> None:
        self._turns, self._choices, self._encoder = turns, choices, encoder
        self._batches, self._first = batches, first
        self._attempt = choices[0].attempt
        self._headers = request_id_header(choices[0].interaction.api, choices[0].interaction.id)

    @classmethod
    async def open(
        cls, request: Request, turns: Turns, asked: TurnRequest, choices: Sequence[Choice], protocol: WireProtocol
    ) -> StreamReply:
        """Wait for the first deltas, or the first keep-alive, and return the reply.

        Raises the ProxyError of a turn that failed before, or ClientDisconnect.
        """
        with _joined(turns, choices[0].attempt):
            batches = _one(choices[0]) if len(choices) == 1 else _merged(choices)
            first = await _first_batch(batches, request)
            choices[0].attempt.join()  # for the time from here to __call__, which leaves it
        first_choice = choices[0]
        created = int(first_choice.interaction.created_at)
        encoder = protocol.stream(asked, first_choice.interaction.id, created, first_choice.prompt_tokens)
        return cls(turns, choices, encoder, batches, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            gone.cancel()
            pump.cancel()
            self._turns.leave(self._attempt)

    async def _pump(self, send: Send) -> None:
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in self._headers.items()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_body(self._encoder.start() + self._encode(self._first)))
        try:
            async for batch in self._batches:
                await send(_body(self._encode(batch)))
            end = self._encoder.finish([choice.answer() for choice in self._choices])
        except ProxyError as error:
            await send(_body(self._encoder.error(error), more=False))
            return
        await send(_body(end, more=False))
        self._turns.replied(self._attempt)

    def _encode(self, batch: Batch) -> bytes:
        if not batch:
            return self._encoder.keepalive()
        return b"".join(self._encoder.delta(delta, choice) for choice, delta in batch)


async def _first_batch(batches: Batches, request: Request) -> Batch:
    return await while_connected(request, asyncio.ensure_future(_next(batches)))


async def _next(batches: Batches) -> Batch:
    return await anext(batches, [])


def request_id_header(api: Api, interaction_id: str) -> dict[str, str]:
    """The request id header, made of the interaction's id, so that a client can report a reply by it."""
    name = "request-id" if api is Api.MESSAGES else "x-request-id"
    return {name: f"req_{interaction_id.partition('_')[2] or interaction_id}"}


@contextmanager
def _joined(turns: Turns, attempt: Attempt) -> Iterator[None]:
    attempt.join()
    try:
        yield
    finally:
        turns.leave(attempt)


async def _one(choice: Choice) -> Batches:
    async for deltas in choice.stream(KEEPALIVE_S):
        yield [(0, delta) for delta in deltas]


async def _merged(choices: Sequence[Choice]) -> Batches:
    """The deltas of several choices in order of arrival; each batch is of one choice."""
    queue: asyncio.Queue[Batch | BaseException | None] = asyncio.Queue()

    async def read(index: int, choice: Choice) -> None:
        try:
            async for deltas in choice.stream(KEEPALIVE_S):
                queue.put_nowait([(index, delta) for delta in deltas])
        except ProxyError as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    readers = [asyncio.create_task(read(index, choice)) for index, choice in enumerate(choices)]
    try:
        running = len(readers)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def begin_turns(
    request: Request, turns: Turns, session: LiveSession, asked: TurnRequest, protocol: WireProtocol
) -> Sequence[Choice]:
    """Begin the turns of a request. If the client leaves while the engine is paused, nothing is recorded.

    Raises the errors of `Turns.begin`, or ClientDisconnect.
    """
    if not turns.held_up:
        return await turns.begin(session, asked, new_id=protocol.new_id)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        # Not in a separate task: nothing may run between the begin of a turn and the moment its reader is attached.
        async with asyncio.timeout(None) as waiting:
            gone.add_done_callback(end := functools.partial(_end, waiting))
            return await turns.begin(session, asked, new_id=protocol.new_id)
    except TimeoutError:
        raise ClientDisconnect from None
    finally:
        gone.remove_done_callback(end)
        gone.cancel()


def _end(waiting: asyncio.Timeout, gone: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the turn began at the same moment, so the timeout is over
        waiting.reschedule(asyncio.get_running_loop().time())
