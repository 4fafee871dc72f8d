"""The endpoints that agents call: a turn in any API, and Anthropic's count_tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from proxy.api.client_hints import stated_purpose
from proxy.api.http import JsonResponse, caller_of, encode_json, read_json
from proxy.api.replies import StreamReply, UnaryReply, begin_turns
from proxy.errors import InvalidRequest
from proxy.protocols.messages.protocol import MessagesProtocol, count_reply
from proxy.protocols.wire_protocol import WireProtocol
from proxy.sessions.access import Access
from proxy.trajectory.purpose import Purpose
from proxy.turns.turns import Turns
from proxy.types import TurnRequest

Endpoint = Callable[[Request], Awaitable[Any]]


def turn_endpoint(protocol: WireProtocol, access: Access, turns: Turns, max_body_bytes: int) -> Endpoint:
    """The endpoint of one API: parse the body, resolve the session, begin the turn, reply."""

    async def endpoint(request: Request) -> UnaryReply | StreamReply:
        await access.admit(caller_of(request))
        body = await read_json(request, max_body_bytes)
        turn_request = with_headers(protocol.parse(body), request)
        _check_echo(turn_request)
        session = await access.resolve(caller_of(request, body))
        try:
            choices = await begin_turns(request.receive, turns, session, turn_request, protocol)
        except RecursionError:  # Python code and templates recurse into schemas and options
            raise InvalidRequest("the body is nested too deeply", param="body") from None
        reply = StreamReply if turn_request.stream else UnaryReply
        return reply(turns, turn_request, choices, protocol)

    return endpoint


def with_headers(turn_request: TurnRequest, request: Request) -> TurnRequest:
    """Add what headers say about a turn: `x-tokengrove-*`, `idempotency-key`, SDK retry counts and client hints."""
    return replace(
        turn_request,
        retry=_is_retry(request.headers.get("x-stainless-retry-count")),
        idempotency_key=request.headers.get("idempotency-key"),
        state_hash=request.headers.get("x-tokengrove-state-hash"),
        purpose=_purpose(request.headers.get("x-tokengrove-purpose")) or stated_purpose(request.headers, turn_request),
        agent=request.headers.get("x-tokengrove-agent"),
    )


def _check_echo(turn_request: TurnRequest) -> None:
    """Raise InvalidRequest if the reply cannot repeat these fields: orjson decodes deeper than it encodes."""
    if not turn_request.echo:
        return
    try:
        encode_json([[[[turn_request.echo, [tool.parameters for tool in turn_request.tools]]]]])
    except (TypeError, RecursionError):
        raise InvalidRequest("the body is nested too deeply", param="body") from None


def _is_retry(count: str | None) -> bool:
    """Whether `x-stainless-retry-count` marks a retry: the OpenAI and Anthropic SDKs send 0 with the first attempt."""
    return count is not None and count.isdecimal() and int(count) > 0


def _purpose(name: str | None) -> str | None:
    if name is not None and name not in list(Purpose):
        raise InvalidRequest(f"x-tokengrove-purpose must be one of {', '.join(Purpose)}", param="x-tokengrove-purpose")
    return name


def count_endpoint(protocol: MessagesProtocol, access: Access, turns: Turns, max_body_bytes: int) -> Endpoint:
    """Anthropic's count_tokens: the number of prompt tokens that the same body would have as a turn."""

    async def endpoint(request: Request) -> JsonResponse:
        await access.admit(caller_of(request))
        body = await read_json(request, max_body_bytes)
        turn_request = protocol.parse_count(body)
        session = await access.resolve(caller_of(request, body))
        try:
            return JsonResponse(count_reply(await turns.count(session, turn_request)))
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply", param="body") from None

    return endpoint
