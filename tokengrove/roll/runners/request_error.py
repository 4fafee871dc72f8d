"""A server's error response to a completion request."""

from __future__ import annotations

from typing import Any

import httpx


class RequestError(httpx.HTTPStatusError):
    """An answer of status 400 or more. `status`; `code`, such as `context_length_exceeded`, or "" if it has none.

    `message` is the server's, and is part of the exception's text. The class is an `httpx.HTTPError`, whichever client
    sent the request.
    """

    def __init__(self, answer: Any) -> None:
        self.status = int(answer.status_code)
        self.code, self.message = _told(answer)
        super().__init__(f"{self.status} {self.message}", request=answer.request, response=answer)

    def __reduce__(self) -> tuple[type[RequestError], tuple[Any]]:
        """Pickle the server's answer; the request, which has the agent's key, is left out."""
        request = httpx.Request("POST", "http://server/v1/chat/completions")
        return RequestError, (httpx.Response(self.status, content=self.response.content, request=request),)

    @property
    def is_limit(self) -> bool:
        """Whether the context is full, or another limit of the session is reached, so that the episode is over."""
        return self.code in _LIMITS


_LIMITS = ("context_length_exceeded", "session_limit_reached", "max_length")


def _told(answer: Any) -> tuple[str, str]:
    """The code and the message of an error: OpenAI's, or ROLL's, a text beside a `stop_reason`."""
    try:
        body = answer.json()
        error = body["error"]
        if isinstance(error, str):
            return str(body.get("stop_reason") or ""), error
        return str(error.get("code") or ""), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", answer.text
