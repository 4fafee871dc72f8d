"""The endpoints that agents speak to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from proxy.api.client_hints import told_purpose
from proxy.api.http import JsonResponse, caller_of, encode_json, read_json
from proxy.api.replies import StreamReply, UnaryReply, begun
from proxy.errors import InvalidRequest
from proxy.protocols.messages.protocol import MessagesProtocol, count_reply
from proxy.protocols.wire_protocol import WireProtocol
from proxy.sessions.access import Access
from proxy.trajectory.purpose import Purpose
from proxy.turns.turns import Turns
from proxy.types import TurnRequest

Endpoint = Callable[[Request], Awaitable[Any]]


def turn_endpoint(protocol: WireProtocol, access: Access, turns: Turns, max_body_bytes: int) -> Endpoint:
    """The endpoint of one API: parse, resolve, begin, reply."""

    async def endpoint(request: Request) -> UnaryReply | StreamReply:
        await access.admit(caller_of(request))
        body = await read_json(request, max_body_bytes)
        turn_request = with_headers(protocol.parse(body), request)
        _check_echo(turn_request)
        session = await access.resolve(caller_of(request, body))
        try:
            choices = await begun(request, turns, session, turn_request, protocol)
        except RecursionError:  # schemas and options are walked by Python and by templates
            raise InvalidRequest("the body is nested too deeply", param="body") from None
        if turn_request.stream:
            return await StreamReply.open(request, turns, turn_request, choices, protocol)
        return UnaryReply(request, turns, turn_request, choices, protocol)

    return endpoint


def with_headers(turn_request: TurnRequest, request: Request) -> TurnRequest:
    """What the harness says of a turn in `x-tokengrove-*` headers, and clients in headers of their own."""
    return replace(
        turn_request,
        retry=_is_retry(request.headers.get("x-stainless-retry-count")),
        idempotency_key=request.headers.get("idempotency-key"),
        state_hash=request.headers.get("x-tokengrove-state-hash"),
        purpose=_purpose(request.headers.get("x-tokengrove-purpose")) or told_purpose(request.headers, turn_request),
        agent=request.headers.get("x-tokengrove-agent"),
    )


def _check_echo(turn_request: TurnRequest) -> None:
    """Raise InvalidRequest for what the reply could not repeat: it may be decoded deeper than it can be encoded."""
    if not turn_request.echo:
        return
    try:
        encode_json([[[[turn_request.echo, [tool.parameters for tool in turn_request.tools]]]]])
    except (TypeError, RecursionError):
        raise InvalidRequest("the body is nested too deeply", param="body") from None


def _is_retry(count: str | None) -> bool:
    """OpenAI's and Anthropic's SDKs count their retries from 0."""
    return count is not None and count.isdecimal() and int(count) > 0


def _purpose(name: str | None) -> str | None:
    if name is not None and name not in list(Purpose):
        raise InvalidRequest(f"x-tokengrove-purpose must be one of {', '.join(Purpose)}", param="x-tokengrove-purpose")
    return name


def count_endpoint(protocol: MessagesProtocol, access: Access, turns: Turns, max_body_bytes: int) -> Endpoint:
    """Anthropic's count_tokens: the prompt tokens that the same body would have as a turn."""

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
