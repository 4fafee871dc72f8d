"""HTTP helpers: callers, JSON, and errors in the envelope of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from proxy.api.answers import id_header, is_google_path, is_messages_path
from proxy.api.headers import headers_of, hint_in, key_in
from proxy.api.neutral_errors import OUTSIDE, shown_to
from proxy.api.wrong_keys import WRONG_KEYS, DelayedResponse
from proxy.protocols.error_envelopes import anthropic_error, google_error, openai_error
from proxy.sessions.access import Caller
from proxy.telemetry.http_request import ROUTE, request_of, without_secret
from tokengrove.errors import InvalidRequest, MethodNotAllowed, NotFound, ProxyError, TooManyRequests

# The openai SDK does not retry after a longer wait; the anthropic SDK waits for any time.
_MAX_RETRY_AFTER_S = 30


_NOT_FOUND = (
    "this is a Tokengrove server, and it has no endpoint {}. Agents call POST /SESSION/v1/chat/completions, "
    "/SESSION/v1/responses, /SESSION/v1/messages or /SESSION/v1beta/models/MODEL:generateContent; "
    "GET /health checks the server; docs/http-api.md lists all endpoints"
)

_HIDING = frozenset({"/v1/models/{model}", "/v1beta/models/{model}", "/rl/sessions/{session}"})
"""Routes that are only read, whose paths end with any text: a POST to such a path means an endpoint that is unknown."""

_NOT_FOUND_OUTSIDE = (
    "there is no endpoint {} here. Agents call POST /chat/completions, /responses or /messages below the base_url of "
    "their session, or /v1beta/models/MODEL:generateContent below its root_url"
)

TOO_DEEP = "the body is nested too deeply"
CRASH = ProxyError("internal error: the server's log has the traceback")


class JsonResponse(Response):
    """A JSON response, encoded by orjson; numpy arrays become lists."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(value: Any) -> bytes:
    """Encode JSON; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def decode_json(body: bytes) -> Any:
    """Decode JSON. Raises InvalidRequest with the position of the error."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}", param="body") from None


def as_object(value: Any) -> Mapping[str, Any]:
    """Return a decoded body if it is an object. Raises InvalidRequest for anything else."""
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    return value


def caller_of(request: Request) -> Caller:
    """The caller: session in the path, key (as in `key_in`), and the client's own session id as a hint."""
    headers = headers_of(request.scope)
    return Caller(path=request.path_params.get("session"), key=key_in(headers), hint=hint_in(headers, None))


def key_of(request: Request) -> str | None:
    """The key of a request."""
    return key_in(headers_of(request.scope))


def error_response(scope: Scope, error: ProxyError) -> Response:
    """The response for `error`, in the envelope of the API that the path belongs to. It is noted in the request record.

    Messages for agents name no address behind the server; the record has the full message. Wrong keys are answered
    with a delay.
    """
    delay, keys = None, scope.get(WRONG_KEYS)
    try:
        delay = keys and keys.count(scope, error)
    except TooManyRequests as flood:
        error = flood
    path, request = scope["path"], request_of(scope)
    status, body = error.status, envelope(path, shown_to(scope, error), request.name())
    headers = {id_header(path): request.name(), "x-should-retry": "true" if error.retryable else "false"}
    if status in (429, 503):
        headers["retry-after"] = str(min(max(round(error.retry_after_s or 1), 1), _MAX_RETRY_AFTER_S))
    if status == 503 and is_messages_path(path):
        status = 529
    request.fail(status, error.code, error.message)
    response = JsonResponse(body, status, headers)
    return response if delay is None else DelayedResponse(response, delay)


def envelope(path: str, error: ProxyError, request_id: str) -> dict[str, Any]:
    """The error body for the API that `path` belongs to."""
    if is_google_path(path):
        return google_error(error)
    return anthropic_error(error, request_id) if is_messages_path(path) else openai_error(error)


async def on_proxy_error(request: Request, error: Exception) -> Response:
    """Handle a ProxyError."""
    assert isinstance(error, ProxyError)
    return error_response(request.scope, error)


def shown_path(request: Request) -> str:
    """The path for messages and logs, with the key or the path secret of a session replaced by `...`."""
    return without_secret(request.scope["path"])


async def on_not_found(request: Request, error: Exception) -> Response:
    """Handle a path without a route."""
    text = _NOT_FOUND_OUTSIDE if OUTSIDE in request.scope else _NOT_FOUND
    return error_response(request.scope, NotFound(text.format(f"{request.method} {shown_path(request)}")))


async def on_method_not_allowed(request: Request, error: Exception) -> Response:
    """Handle a method that the route of this path does not support. The `allow` header lists the supported methods."""
    if request.method == "POST" and request.scope.get(ROUTE) in _HIDING:
        return await on_not_found(request, error)
    headers = dict(getattr(error, "headers", None) or {})
    allowed = headers.get("Allow", "another method")
    problem = MethodNotAllowed(f"{shown_path(request)} does not support {request.method}; use {allowed}")
    response = error_response(request.scope, problem)
    response.headers.update(headers)
    return response


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Handle a client that disconnected while it sent its request. The response is never read."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)


async def on_crash(request: Request, error: Exception) -> Response:
    """Handle an unexpected exception: the client gets one sentence, and the traceback is logged."""
    return error_response(request.scope, CRASH)
