"""Error envelopes: OpenAI's for chat, responses and this server's own endpoints, Anthropic's for messages."""

from __future__ import annotations

from typing import Any

from tokengrove.errors import ContextLengthExceeded, ProxyError

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(error: ProxyError) -> dict[str, Any]:
    """Return the OpenAI error envelope."""
    kind = _OPENAI_TYPES.get(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ProxyError, request_id: str) -> dict[str, Any]:
    """Return the Anthropic error envelope of an HTTP reply."""
    return {**anthropic_error_event(error), "request_id": request_id}


def anthropic_error_event(error: ProxyError) -> dict[str, Any]:
    """Return the payload of an Anthropic `error` event: the envelope without a request id."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    body: dict[str, Any] = {"type": kind, "message": _anthropic_message(error)}
    if error.details is not None:
        body["details"] = error.details
    return {"type": "error", "error": body}


def _anthropic_message(error: ProxyError) -> str:
    """Return the message. Claude Code matches the context-length message verbatim, then compacts and retries."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum"
