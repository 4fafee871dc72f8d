"""Between HTTP and the rest: bodies within the limit, callers, JSON, errors in the envelope of the API called."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proxy.errors import BodyTooLarge, InvalidRequest, MethodNotAllowed, NotFound, ProxyError
from proxy.protocols.error_envelopes import anthropic_error, openai_error
from proxy.sessions.access import Caller
from proxy.sessions.ids import check_session_id

_SECRET = re.compile("~[^/]*")
# Above this, openai clients refuse to retry and anthropic ones sleep on.
_MAX_RETRY_AFTER_S = 30
# opencode gives a sub-agent a session of its own: it belongs to the one that started it.
_HINT_HEADERS = ("x-claude-code-session-id", "session-id", "x-parent-session-id", "x-session-id")


class JsonResponse(Response):
    """JSON by orjson; numpy arrays become lists."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(value: Any) -> bytes:
    """JSON bytes; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known to be longer than `limit` bytes."""
    too_large = BodyTooLarge(f"the body is longer than {limit} bytes (--max-body-bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json(request: Request, limit: int) -> Any:
    """The decoded JSON body. Raises InvalidRequest for anything that is not JSON in UTF-8."""
    return decode_json(await read_body(request, limit))


def decode_json(body: bytes) -> Any:
    """A JSON value. Raises InvalidRequest that says where the text stops being JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}", param="body") from None


async def read_object(request: Request, limit: int) -> Mapping[str, Any]:
    """The JSON object in the body; an empty body is an empty object."""
    body = await read_body(request, limit)
    value = decode_json(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    return value


def caller_of(request: Request, body: Any = None) -> Caller:
    """Who calls: the session part of the path, the key (Bearer or x-api-key), the client's own hint at a session."""
    return Caller(path=request.path_params.get("session"), key=key_of(request), hint=_hint_of(request, body))


def key_of(request: Request) -> str | None:
    """The key of a request, from `Authorization: Bearer` or `x-api-key`."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key") or None


def _hint_of(request: Request, body: Any) -> str | None:
    values = [request.headers.get(name) for name in _HINT_HEADERS]
    if isinstance(body, Mapping):
        values += [_metadata_session(body.get("metadata")), body.get("prompt_cache_key")]
    return next((value for value in values if _can_be_id(value)), None)


def _metadata_session(metadata: Any) -> Any:
    """Claude Code puts its session into `metadata.user_id`, a JSON string."""
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    try:
        decoded = orjson.loads(user) if isinstance(user, str) else None
    except orjson.JSONDecodeError:
        return None
    return decoded.get("session_id") if isinstance(decoded, dict) else None


def _can_be_id(value: Any) -> bool:
    try:
        return value is not None and bool(check_session_id(value))
    except InvalidRequest:
        return False


def error_response(request: Request, error: ProxyError) -> Response:
    """`error` as the called API words it."""
    request_id = f"req_{uuid.uuid4().hex}"
    status, body = error.status, envelope(request.url.path, error, request_id)
    headers = {"request-id": request_id, "x-should-retry": "true" if error.retryable else "false"}
    if status in (429, 503):
        headers["retry-after"] = str(min(max(round(error.retry_after_s or 1), 1), _MAX_RETRY_AFTER_S))
    if status == 503 and is_messages_path(request.url.path):
        status = 529
    return JsonResponse(body, status, headers)


def envelope(path: str, error: ProxyError, request_id: str) -> dict[str, Any]:
    """The error body for the API that `path` belongs to."""
    return anthropic_error(error, request_id) if is_messages_path(path) else openai_error(error)


def is_messages_path(path: str) -> bool:
    """Whether a path is Anthropic's."""
    return path.endswith(("/messages", "/messages/count_tokens"))


async def on_proxy_error(request: Request, error: Exception) -> Response:
    """The handler of every ProxyError."""
    assert isinstance(error, ProxyError)
    return error_response(request, error)


def shown_path(request: Request) -> str:
    """The path for messages and logs: what may be a session's secret is left out."""
    return _SECRET.sub("~...", request.url.path)


async def on_not_found(request: Request, error: Exception) -> Response:
    """No route has this path."""
    path = f"{request.method} {shown_path(request)}"
    return error_response(request, NotFound(f"there is no {path} here; the README lists the endpoints"))


async def on_method_not_allowed(request: Request, error: Exception) -> Response:
    """A route has this path, with another method; Starlette says which in `allow`."""
    response = error_response(request, MethodNotAllowed(f"{shown_path(request)} does not take {request.method}"))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while sending; nobody reads this."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)


async def on_crash(request: Request, error: Exception) -> Response:
    """Anything unforeseen: a sentence for the client, the traceback for the log."""
    return error_response(request, ProxyError("the server failed on this request; its log says how"))
