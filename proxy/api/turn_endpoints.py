"""The endpoints that agents call: a turn in any API, and the number of prompt tokens that it would have.

A turn bypasses Starlette's requests and middleware, which would cost more than parsing the body.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api import bodies as limits
from proxy.api.bodies import Bodies, Upload
from proxy.api.client_hints import add_headers
from proxy.api.completion_prompts import each_prompt, score_prompts
from proxy.api.forwarding import Forwarded, Forwarding
from proxy.api.headers import Headers, headers_of, hint_in, key_in, sub_agent_in
from proxy.api.http import CRASH, TOO_DEEP, JsonResponse, decode_json, encode_json, error_response
from proxy.api.neutral_errors import OUTSIDE
from proxy.api.replies import BatchReply, Header, StreamReply, UnaryReply, begin_each, begin_turns, session_header
from proxy.parsed_items import ParsedBodies
from proxy.protocols.completions.reply import ECHO
from proxy.protocols.fields import check_text
from proxy.protocols.hosted_tools import check_hosted
from proxy.protocols.wire_protocol import WireProtocol
from proxy.resources.senders import Sender
from proxy.resources.turnstile import Turnstile
from proxy.sessions.access import Access, Caller, agent_in
from proxy.sessions.episodes import HEADER
from proxy.sessions.live_session import LiveSession
from proxy.telemetry.http_request import REQUEST, HttpRequest, request_of
from proxy.turns.choice import Choice
from proxy.turns.defaults import leave_out_effort
from proxy.turns.route import Routes
from proxy.turns.spans import trace_request, trace_turns
from proxy.turns.turns import Turns
from proxy.types import Api, ImageFile, TurnRequest
from proxy.workers.attempt_table import RunsElsewhere
from tokengrove.errors import InvalidRequest, ProxyError, SessionClosed

# A turn with a longer body keeps its share of the body budget while the engine is paused.
_ORDINARY = 2**20

EPISODE = HEADER.encode()

_LEVELS_AROUND = 12
"""The most levels of lists and objects around these fields in replies, views and exports."""

if TYPE_CHECKING:
    from tokengrove.spans import Tracing

Endpoint = Callable[[Request], Awaitable[JsonResponse]]


class StreamForms:
    """The ASGI endpoint of streamed turns in Google's API: the query tells the form of the stream."""

    def __init__(self, events: ASGIApp, array: ASGIApp) -> None:
        self._events, self._array = events, array

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._events if b"alt=sse" in scope["query_string"].split(b"&") else self._array
        await endpoint(scope, receive, send)


class _Arrived(NamedTuple):
    """A request whose body was read and decoded.

    `sent`: the bytes to forward. `read`: when, by the monotonic clock. `model`: the name in the address, in APIs that
    have it there. `outside`: whether it came to the listener for agents.
    """

    request: HttpRequest
    caller: Caller
    headers: Headers
    receive: Receive
    upload: Upload
    body: Any
    sent: bytes
    size: int
    files: dict[str, ImageFile] | None
    read: float
    model: str | None
    outside: bool


class TurnEndpoint:
    """The ASGI endpoint of one API: read the body, parse it, find the session, begin the turn, reply."""

    def __init__(
        self,
        protocol: WireProtocol,
        access: Access,
        turns: Turns,
        turnstile: Turnstile,
        bodies: Bodies,
        forwarding: Forwarding | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`forwarding`: to other workers; None if there are none. `tracing`: None if no traces are made."""
        self._protocol, self._access, self._turns, self._bodies = protocol, access, turns, bodies
        self._turnstile, self._forwarding, self._tracing = turnstile, forwarding, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply: UnaryReply | StreamReply | Forwarded | None = None
        request: HttpRequest = scope.get(REQUEST) or request_of(scope)
        if self._tracing is not None:
            request.begin_trace(self._tracing, scope)
        try:
            reply = await self._begin(request, scope, receive)
            await reply(scope, receive, send)
        except ProxyError as error:
            await error_response(scope, error)(scope, receive, send)
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)  # never read
        except Exception:
            if reply is None or not reply.started:
                await error_response(scope, CRASH)(scope, receive, send)
            else:
                request.break_off(CRASH.code, CRASH.message)
            raise  # the server logs the traceback

    async def _begin(
        self, request: HttpRequest, scope: Scope, receive: Receive
    ) -> UnaryReply | StreamReply | Forwarded:
        """Begin the turn and return its reply. Raises ProxyError or ClientDisconnect."""
        headers = headers_of(scope)
        caller = Caller(scope["path_params"].get("session"), key_in(headers))
        if not self._access.open_server:  # access does not depend on the body: check it before reading
            await self._access.resolve(caller)
        with Upload(self._bodies, scope, headers, receive) as upload:
            return await self._begin_as_asked(scope, request, caller, headers, receive, upload)

    async def _begin_as_asked(
        self, scope: Scope, request: HttpRequest, caller: Caller, headers: Headers, receive: Receive, upload: Upload
    ) -> UnaryReply | StreamReply | Forwarded:
        """Begin the turn that the body requests."""
        sent, path = await upload.read(), caller.path
        read, sender = time.monotonic(), upload.sender
        await self._turnstile.enter(sender)
        entered = self._turnstile.passes
        if len(sent) <= limits.INLINE:
            body, size = decode_json(sent), len(sent)
        else:
            body, size = await upload.decode_turn(sent)
        if len(sent) <= _ORDINARY and self._turns.blocked:
            upload.release()  # thousands of requests may wait for a paused engine
        if self._forwarding is None:
            sent = b""
        if not path:
            caller = _named_by_client(caller, headers, body)
        if EPISODE in headers:
            caller = caller._replace(episode=check_text(headers[EPISODE], HEADER))
        session = await self._access.resolve(caller)
        if sender.name != session.id:
            sender = Sender(sender.host, session.id)
        if self._turnstile.passes != entered:  # many requests may have waited for one query
            await self._turnstile.enter(sender)
        files = None
        if self._bodies.images is not None:
            files = await upload.read_images(body, size, self._protocol.api, session)
        model, outside = scope["path_params"].get("model"), OUTSIDE in scope
        arrived = _Arrived(request, caller, headers, receive, upload, body, sent, size, files, read, model, outside)
        while True:
            try:
                return await self._begin_in(session, sender, arrived)
            except SessionClosed as closed:
                session = await self._access.after(session, closed, caller)

    async def _begin_in(
        self, session: LiveSession, sender: Sender, arrived: _Arrived
    ) -> UnaryReply | StreamReply | Forwarded:
        """Begin the turn in a session. Raises SessionClosed if the session takes no turn by now."""
        request, caller, headers, receive, upload, body, sent, size, files, read, model, outside = arrived
        path = caller.path
        request.session, request.metadata = session.id, session.record.metadata
        if size <= limits.INLINE_WORK:
            asked = self._protocol.parse(body, session.parsed)
        else:
            asked = await upload.work(size, self._protocol.parse, body, session.parsed)
        if files:
            asked.files = files
        asked.model = model or asked.model
        routes, asked.sender = self._turns.routes, sender
        if routes.names.declared:
            routes.assign(asked, session.record)
        asked.model = asked.model or routes.main.model
        add_headers(asked, headers, None if path is None or path == session.id else agent_in(path, session.id))
        asked.request_id, asked.outside = request.client_id, outside
        asked.timeline.received, asked.timeline.read = request.started, read
        if request.trace is not None:
            trace_request(request.trace, asked)
        parts = each_prompt(asked) if asked.further_prompts else (asked,)
        if ECHO in asked.echo:
            decode = routes.engine(asked.route).renderer.decode
            for part in parts:
                if part.input_ids is not None:
                    part.echo = {ECHO: await upload.do(size, decode, part.input_ids)}
        if asked.tools or asked.template_options or asked.echo:
            await upload.do(size, _check_depth, asked)
        try:
            if asked.score_prompt:
                await score_prompts(receive, self._turns, session, parts)
            if asked.further_prompts:
                begun = await begin_each(receive, self._turns, session, parts, self._protocol)
                if request.trace is not None:
                    for part, choices in zip(parts, begun, strict=True):
                        trace_turns(request.trace, part, choices)
                return BatchReply(self._turns, list(zip(parts, begun, strict=True)), self._shown(caller, begun[0]))
            choices = await begin_turns(receive, self._turns, session, asked, self._protocol)
        except RecursionError:  # Python code and templates recurse into schemas and options
            raise InvalidRequest(TOO_DEEP, param="body") from None
        except RunsElsewhere as found:
            assert self._forwarding is not None
            return self._forwarding.to(found.worker, sent, upload)
        if request.trace is not None:
            trace_turns(request.trace, asked, choices)
        reply = StreamReply if asked.stream else UnaryReply
        shown = () if path and "~" not in path else self._shown(caller, choices)
        return reply(self._turns, asked, choices, self._protocol, shown)

    def _shown(self, caller: Caller, choices: Sequence[Choice]) -> Sequence[Header]:
        """The headers that name the session to a caller that names none."""
        return () if caller.names_session or not self._access.open_server else (session_header(choices),)


def _named_by_client(caller: Caller, headers: Headers, body: Any) -> Caller:
    """The caller with the sessions that its client names by itself."""
    return caller._replace(hint=hint_in(headers, body), sub_agent=sub_agent_in(headers))


def _check_depth(asked: TurnRequest) -> None:
    """Raise InvalidRequest if these fields are too deep for replies, views and exports.

    orjson decodes deeper values than it encodes.
    """
    repeated: Any = [asked.echo, asked.template_options, [tool.parameters for tool in asked.tools]]
    for _ in range(_LEVELS_AROUND):
        repeated = [repeated]
    try:
        encode_json(repeated)
    except (TypeError, RecursionError):
        raise InvalidRequest(TOO_DEEP, param="body") from None


def count_endpoint(
    api: Api,
    parse: Callable[[Any, ParsedBodies], TurnRequest],
    reply: Callable[[int], Mapping[str, Any]],
    access: Access,
    routes: Routes,
    bodies: Bodies,
) -> Endpoint:
    """The endpoint for the number of prompt tokens that the body would have as a turn.

    `parse` parses the body in the form of `api`. `reply`: the reply with a number.
    """

    async def endpoint(request: Request) -> JsonResponse:
        headers, path = headers_of(request.scope), request.path_params.get("session")
        key = key_in(headers)
        if not access.open_server:
            await access.resolve(Caller(path, key))
        with bodies.upload(request.scope, headers, request.receive) as upload:
            sent = await upload.read()
            body, size = await upload.decode_turn(sent)
            session = await access.resolve(Caller(path, key, None if path else hint_in(headers, body)))
            await upload.read_images(body, size, api, session, sizes_only=True)
            asked = await upload.do(size, parse, body, session.parsed)
            asked.sender = upload.sender._replace(name=session.id)
            asked.model = request.path_params.get("model") or asked.model
            routes.assign(asked, session.record)
            route = routes.engine(asked.route)
            check_hosted(asked.dropped, route.settings.hosted_tools)
            leave_out_effort(asked, route.renderer)
            try:
                prompt = await route.tokens.prompt(session, asked)
                return JsonResponse(reply(len(prompt)))
            except RecursionError:
                raise InvalidRequest(TOO_DEEP, param="body") from None

    return endpoint
