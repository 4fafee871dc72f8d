"""Error envelopes: OpenAI's for chat, responses and this server's own endpoints; Anthropic's for messages."""

from __future__ import annotations

from typing import Any

from proxy.errors import ContextLengthExceeded, ProxyError

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(error: ProxyError) -> dict[str, Any]:
    """The OpenAI error envelope; chat and responses share it."""
    kind = _OPENAI_TYPES.get(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ProxyError, request_id: str) -> dict[str, Any]:
    """The Anthropic error envelope."""
    return {**anthropic_error_event(error), "request_id": request_id}


def anthropic_error_event(error: ProxyError) -> dict[str, Any]:
    """A failure as the API words it; in the envelope of a response stands its request id as well."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": _anthropic_message(error)}}


def _anthropic_message(error: ProxyError) -> str:
    """Claude Code compacts and tries again on exactly these words."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    return f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum"
