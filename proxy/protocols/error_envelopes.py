"""Error envelopes: OpenAI's for most endpoints, Anthropic's for messages, Google's for its API."""

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

_GOOGLE_RPC = "type.googleapis.com/google.rpc."
_GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    410: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
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


def google_error(error: ProxyError) -> dict[str, Any]:
    """Return Google's error envelope. The details name the field, and the code that the other envelopes have."""
    status = _GOOGLE_STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    details: list[dict[str, Any]] = [{"@type": f"{_GOOGLE_RPC}ErrorInfo", "reason": error.code, "domain": "tokengrove"}]
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": f"{_GOOGLE_RPC}BadRequest", "fieldViolations": [violation]})
    return {"error": {"code": error.status, "message": error.message, "status": status, "details": details}}
