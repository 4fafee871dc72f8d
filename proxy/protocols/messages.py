"""Anthropic messages: the error envelope. The API itself answers 501 in this shape until it is here."""

from __future__ import annotations

from typing import Any

from proxy.errors import ProxyError

_ERROR_TYPES = {
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


def anthropic_error(error: ProxyError, request_id: str) -> dict[str, Any]:
    """The Anthropic error envelope."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
