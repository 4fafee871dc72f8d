"""HTTP replies of turns, unary or streamed. The end is written only after the commit; a disconnect ends the reply.

Both replies are ASGI applications. If a turn fails before anything was written (`started` is False), they raise its
ProxyError.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from proxy.api.connections import LINE, ClientLine, connected_until, disconnected, while_connected
from proxy.api.http import encode_json
from proxy.api.neutral_errors import OUTSIDE, neutral, outside
from proxy.api.session_json import quoted
from proxy.api.turn_lines import TurnLines
from proxy.protocols.completions.protocol import CompletionsProtocol
from proxy.protocols.completions.reply import completions_json
from proxy.protocols.wire_protocol import WireProtocol
from proxy.sessions.live_session import LiveSession
from proxy.telemetry.http_request import REQUEST, HttpRequest, request_of
from proxy.turns.choice import Choice
from proxy.turns.turns import Turns
from proxy.types import Api, TurnRequest
from tokengrove.errors import ProxyError

# Codex abandons a silent stream after 300 s, reverse proxies often after 30 to 60 s.
KEEPALIVE_S = 5.0
# The most deltas written at once. A replay, or a retry that attaches late, may have tens of thousands of tokens to
# write: this many delay no other request, and a slow client has little left to read. A delta may have the logprobs of
# some tens of tokens.
_DELTAS_AT_ONCE = 64
# The same for turns that have ended. Such replies take turns, so that many at once also delay no other request.
_DELTAS_OF_ENDED = 16
# Proxies refuse headers of several kilobytes.
_IGNORED_BYTES = 1024


Header = tuple[bytes, bytes]
"""The name of a header, in lower case, and its value."""


class UnaryReply:
    """Waits until all choices are committed, then sends one body."""

    def __init__(
        self,
        turns: Turns,
        asked: TurnRequest,
        choices: Sequence[Choice],
        protocol: WireProtocol,
        headers: Sequence[Header] = (),
    ) -> None:
        self._turns, self._asked, self._choices, self._protocol = turns, asked, choices, protocol
        self._headers = (*headers, *ignored_header(asked.dropped)) if asked.dropped else headers
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told: HttpRequest = scope.get(REQUEST) or request_of(scope)
        request, attempt = _named(told, self._turns, self._choices), self._choices[0].attempt
        attempt.join()
        try:
            for choice in self._choices:
                if not await _connected_until(choice.ended, scope, receive):
                    request.left = True
                    return
            await self._answer(request, send)
            self._turns.replied(attempt)
        finally:
            self._turns.leave(attempt)

    async def _answer(self, request: HttpRequest, send: Send) -> None:
        body = encode_json(self._body())
        headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
            request_id_header(self._protocol.api, request),
            *self._headers,
        ]
        self.started, request.status = True, 200
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _body(self) -> dict[str, Any]:
        choices = self._choices
        answers = [choices[0].answer()] if len(choices) == 1 else [choice.answer() for choice in choices]
        return self._protocol.reply(self._asked, answers)


class BatchReply(UnaryReply):
    """Waits until the choices of all prompts of a request are committed, then sends one body."""

    def __init__(
        self, turns: Turns, parts: Sequence[tuple[TurnRequest, Sequence[Choice]]], headers: Sequence[Header] = ()
    ) -> None:
        """`parts`: the requests of the prompts, with their choices, to whose attempts the client is attached."""
        choices = [choice for _, chosen in parts for choice in chosen]
        super().__init__(turns, parts[0][0], choices, CompletionsProtocol(), headers)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _named(request_of(scope), self._turns, self._choices)
        attempts = [choices[0].attempt for _, choices in self._parts]
        try:
            for choice in self._choices:
                if not await _connected_until(choice.ended, scope, receive):
                    request.left = True
                    return
            await self._answer(request, send)
            for attempt in attempts:
                self._turns.replied(attempt)
        finally:
            for attempt in attempts:
                self._turns.leave(attempt)

    def _body(self) -> dict[str, Any]:
        parts = [(asked, [choice.answer() for choice in choices]) for asked, choices in self._parts]
        return completions_json(parts)


class StreamReply:
    """Streams events as tokens arrive. It starts with the first one, so that an early failure has its HTTP status.

    One task writes the new tokens of all choices; a change of a choice wakes it. If the server offers a `ClientLine`,
    this is the task of the request. While it waits for a change (`_waits`), the change is written without waking it,
    which would run through the frames of all its callers for each token.
    """

    def __init__(
        self,
        turns: Turns,
        asked: TurnRequest,
        choices: Sequence[Choice],
        protocol: WireProtocol,
        headers: Sequence[Header] = (),
    ) -> None:
        first = choices[0]
        created = int(first.interaction.created_at)
        self._turns, self._choices = turns, choices
        prompt_ids = first.prompt_ids if asked.return_token_ids else None
        self._encoder = protocol.stream(asked, first.interaction.id, created, first.prompt_tokens, prompt_ids)
        self._headers = (*headers, *ignored_header(asked.dropped)) if asked.dropped else headers
        self._head = self._encoder.start()
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._line: ClientLine | None = None
        self._left = self._waits = False
        self._seen = [0] * len(choices)
        self._written_at = self._loop.time()
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, attempt = _named(request_of(scope), self._turns, self._choices), self._choices[0].attempt
        line = self._line = scope.get(LINE)
        wake: Callable[[], Any] = self._wake
        if line is not None:
            wake = functools.partial(self._loop.call_soon, self._flush)
        attempt.join()
        for choice in self._choices:
            choice.watchers.append(wake)
        self._timer = self._loop.call_later(KEEPALIVE_S, self._look)
        try:
            if line is None:
                await while_connected(receive, self._write(request, scope, send))
            else:
                self._left = line.left
                line.watchers.append(self._on_left)
                await self._write(request, scope, send)
        except ClientDisconnect:
            request.left = True
        finally:
            self._end_watching(wake)
            self._turns.leave(attempt)

    async def _write(self, request: HttpRequest, scope: Scope, send: Send) -> None:
        """Write the reply. Raises ClientDisconnect if the line tells that the client has left."""
        over = self._over()
        over.add_done_callback(self._on_end)
        while True:
            changed = self._changed = self._loop.create_future()
            if self._left:
                raise ClientDisconnect
            events, behind = self._news(_DELTAS_OF_ENDED if over.done() else _DELTAS_AT_ONCE)
            if not events and self._loop.time() - self._written_at >= KEEPALIVE_S:
                events = self._encoder.keepalive()
            if events:
                if not self.started:
                    events = await self._start(request, send) + events
                self._written_at = self._loop.time()
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if behind and over.done():
                await self._turns.earlier.yield_to_others()
            elif behind:
                await asyncio.sleep(0)  # `send` does not yield while the connection accepts data
            elif not changed.done():  # no change since the deltas were read
                if over.done():
                    break
                self._waits = self.started
                await changed
                self._waits = False
        await self._end(request, scope, send, over)

    def _over(self) -> asyncio.Future[Any]:
        """Done once all choices have ended, or one has failed."""
        choices = self._choices
        return choices[0].ended if len(choices) == 1 else asyncio.gather(*[choice.ended for choice in choices])

    def _news(self, most: int) -> tuple[bytes, bool]:
        """The events of up to `most` new deltas of each choice, and whether there are more."""
        events, behind = b"", False
        for index, choice in enumerate(self._choices):
            seen = self._seen[index]
            if deltas := choice.deltas[seen : seen + most]:
                self._seen[index] = seen = seen + len(deltas)
                events += self._encoder.deltas(deltas, index)
                behind = behind or seen < len(choice.deltas)
        return events, behind

    def _flush(self) -> None:
        """Write new deltas over the line if the task waits for them; wake it for all else."""
        line = self._line
        assert line is not None
        if not self._waits or self._changed.done() or line.flow.write_paused:
            self._wake()
            return
        try:
            events, behind = self._news(_DELTAS_AT_ONCE)
            if events:
                self._written_at = self._loop.time()
                line.write(events)
            if behind:
                self._wake()
        except Exception as error:  # the task of the request raises it, which reports it and ends the reply
            self._changed.set_exception(error)

    async def _start(self, request: HttpRequest, send: Send) -> bytes:
        """Send the headers, and return the first events of the stream."""
        self.started, request.status = True, 200
        headers = [
            (b"content-type", self._encoder.content_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            request_id_header(self._choices[0].interaction.api, request),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        return self._head

    async def _end(self, request: HttpRequest, scope: Scope, send: Send, over: asyncio.Future[Any]) -> None:
        try:
            over.result()
            events = self._encoder.finish([choice.answer() for choice in self._choices])
        except ProxyError as error:
            if not self.started:
                raise
            request.break_off(error.code, error.message)
            shown = outside(error) if OUTSIDE in scope else neutral(error)
            await send({"type": "http.response.body", "body": self._encoder.error(shown)})
            return
        if not self.started:
            events = await self._start(request, send) + events
        await send({"type": "http.response.body", "body": events})
        if self._left:
            raise ClientDisconnect
        self._turns.replied(self._choices[0].attempt)

    def _on_left(self) -> None:
        self._left = True
        self._wake()

    def _end_watching(self, wake: Callable[[], Any]) -> None:
        self._timer.cancel()
        self._waits = False
        for choice in self._choices:
            choice.watchers.remove(wake)
        if self._line is not None:
            self._line.watchers.remove(self._on_left)

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    def _on_end(self, over: asyncio.Future[Any]) -> None:
        if not over.cancelled():
            over.exception()  # retrieved here, because nothing else does if the client has left
        self._wake()

    def _look(self) -> None:
        """Wake the writer if nothing was written for `KEEPALIVE_S` seconds. One timer per stream, not per wait."""
        left = self._written_at + KEEPALIVE_S - self._loop.time()
        if left <= 0:
            self._wake()
        self._timer = self._loop.call_later(left if left > 0 else KEEPALIVE_S, self._look)


def _connected_until(end: asyncio.Future[Any], scope: Scope, receive: Receive) -> Coroutine[Any, Any, bool]:
    """Wait until `end` is done. Return False if the client leaves first."""
    line: ClientLine | None = scope.get(LINE)
    return connected_until(end, receive) if line is None else line.connected_until(end)


def session_header(choices: Sequence[Choice]) -> Header:
    """The header that names the session of a turn."""
    return b"x-tokengrove-session", quoted(choices[0].interaction.session_id).encode()


def ignored_header(dropped: Sequence[str]) -> tuple[Header, ...]:
    """The header that names the `dropped` fields of a request; no header if there are none.

    Names are percent-encoded like a URL and separated by commas. If there are too many, the first are followed by
    `...`.
    """
    if not dropped:
        return ()
    names, left = [], _IGNORED_BYTES
    for name in dropped:
        shown = quote(name[:_IGNORED_BYTES].encode(errors="surrogatepass"), safe=" []._-")
        left -= len(shown) + 1
        if left < 0:
            names.append("...")
            break
        names.append(shown)
    return ((b"x-tokengrove-ignored", ",".join(names).encode()),)


def _named(request: HttpRequest, turns: Turns, choices: Sequence[Choice]) -> HttpRequest:
    """The record of a request. Its id is the interaction id, unless the client has set one."""
    request.tell = TurnLines(choices, content=turns.log_content)
    if request.id is None:
        interaction_id = choices[0].interaction.id
        request.id = f"req_{interaction_id.partition('_')[2] or interaction_id}"
    return request


def request_id_header(api: Api, request: HttpRequest) -> Header:
    """The header of the request id, with which a client can report a reply."""
    return b"request-id" if api is Api.MESSAGES else b"x-request-id", (request.id or request.name()).encode()


async def begin_turns(
    receive: Receive, turns: Turns, session: LiveSession, asked: TurnRequest, protocol: WireProtocol
) -> Sequence[Choice]:
    """Begin the turns of a request. If the client leaves before the engine takes it, nothing is recorded.

    Raises the errors of `Turns.begin`, or ClientDisconnect.
    """
    if not turns.routes.main.gate.closed and turns.absence.since is None:
        return await turns.begin(session, asked, new_id=protocol.new_id)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        # Not in a separate task: nothing may run between the start of a turn and the attachment of its reader.
        async with asyncio.timeout(None) as waiting:
            gone.add_done_callback(end := functools.partial(_end, waiting))
            return await turns.begin(session, asked, new_id=protocol.new_id)
    except TimeoutError:
        raise ClientDisconnect from None
    finally:
        gone.remove_done_callback(end)
        gone.cancel()


async def begin_each(
    receive: Receive, turns: Turns, session: LiveSession, parts: Sequence[TurnRequest], protocol: WireProtocol
) -> list[Sequence[Choice]]:
    """Begin the turns of the prompts of a request, with the client attached to each. If one fails, the others end.

    Attached before the next begins, so that equal prompts are separate samples. Raises as `begin_turns`.
    """
    begun: list[Sequence[Choice]] = []
    try:
        for asked in parts:
            choices = await begin_turns(receive, turns, session, asked, protocol)
            choices[0].attempt.join()
            begun.append(choices)
    except BaseException:
        for choices in begun:
            turns.leave(choices[0].attempt)
        raise
    return begun


def _end(waiting: asyncio.Timeout, gone: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the turn began at the same moment, so the timeout is over
        waiting.reschedule(asyncio.get_running_loop().time())
