"""HTTP helpers: bodies within the size limit, callers, JSON, and errors in the envelope of the API that was called."""

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
# After a longer wait the openai SDK does not retry; the anthropic SDK sleeps through it.
_MAX_RETRY_AFTER_S = 30
# In order of preference. An opencode sub-agent has a session of its own and belongs to its parent's.
_HINT_HEADERS = ("x-claude-code-session-id", "session-id", "x-parent-session-id", "x-session-id")


_NOT_FOUND = (
    "this is a Tokengrove server, and it has no endpoint {}. Agents call POST /SESSION/v1/chat/completions, "
    "/SESSION/v1/responses or /SESSION/v1/messages; GET /health checks the server; docs/http-api.md lists all endpoints"
)


class JsonResponse(Response):
    """A JSON response, encoded by orjson; numpy arrays become lists."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def encode_json(value: Any) -> bytes:
    """Encode JSON; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


async def read_body(request: Request, limit: int) -> bytes:
    """Read the whole body. Raises BodyTooLarge as soon as it is known to exceed `limit` bytes."""
    too_large = BodyTooLarge(f"the body exceeds the limit of {limit} bytes; raise the limit with --max-body-bytes")
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
    """Read a JSON body. Raises InvalidRequest if it is not JSON in UTF-8."""
    return decode_json(await read_body(request, limit))


def decode_json(body: bytes) -> Any:
    """Decode JSON. Raises InvalidRequest with the position of the error."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}", param="body") from None


async def read_object(request: Request, limit: int) -> Mapping[str, Any]:
    """Read a JSON object; an empty body is an empty object. Raises InvalidRequest for anything else."""
    body = await read_body(request, limit)
    value = decode_json(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    return value


def caller_of(request: Request, body: Any = None) -> Caller:
    """The caller: session in the path, key (Bearer or x-api-key), and the client's own session id as a hint."""
    return Caller(path=request.path_params.get("session"), key=key_of(request), hint=_hint_of(request, body))


def key_of(request: Request) -> str | None:
    """The key of a request, from `Authorization: Bearer`, else `x-api-key`."""
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
    """The session id of Claude Code, which it puts into `metadata.user_id`, a JSON string."""
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
    """The response for `error`, in the envelope of the API that was called."""
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
    """Whether a path belongs to Anthropic's Messages API."""
    return path.endswith(("/messages", "/messages/count_tokens"))


async def on_proxy_error(request: Request, error: Exception) -> Response:
    """Handle a ProxyError."""
    assert isinstance(error, ProxyError)
    return error_response(request, error)


def shown_path(request: Request) -> str:
    """The path for messages and logs, with a session's path secret replaced by `...`."""
    return _SECRET.sub("~...", request.url.path)


async def on_not_found(request: Request, error: Exception) -> Response:
    """Handle a path that no route has."""
    return error_response(request, NotFound(_NOT_FOUND.format(f"{request.method} {shown_path(request)}")))


async def on_method_not_allowed(request: Request, error: Exception) -> Response:
    """Handle a method that the route of this path does not have; the header `allow` lists those it has."""
    headers = dict(getattr(error, "headers", None) or {})
    allowed = headers.get("Allow", "another method")
    problem = MethodNotAllowed(f"{shown_path(request)} does not support {request.method}; use {allowed}")
    response = error_response(request, problem)
    response.headers.update(headers)
    return response


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Handle a client that left while it sent its request; nobody reads the response."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)


async def on_crash(request: Request, error: Exception) -> Response:
    """Handle an unexpected exception: the client gets one sentence, the log the traceback."""
    return error_response(request, ProxyError("internal error: the server's log has the traceback"))
