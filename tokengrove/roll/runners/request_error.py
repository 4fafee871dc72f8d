"""What a server answered in place of a completion, with the text of its error."""

from __future__ import annotations

from typing import Any

import httpx


class RequestError(httpx.HTTPStatusError):
    """An answer of status 400 or more. `status`; `code`, such as `context_length_exceeded`, or "" if it names none.

    `message` is the server's, and stands in its text. It is an `httpx.HTTPError`, whichever client sent the request.
    """

    def __init__(self, answer: Any) -> None:
        self.status = int(answer.status_code)
        self.code, self.message = _told(answer)
        super().__init__(f"{self.status} {self.message}", request=answer.request, response=answer)

    def __reduce__(self) -> tuple[type[RequestError], tuple[Any]]:
        """As what the server answered; the request, which has the agent's key, is left out."""
        request = httpx.Request("POST", "http://server/v1/chat/completions")
        return RequestError, (httpx.Response(self.status, content=self.response.content, request=request),)

    @property
    def is_limit(self) -> bool:
        """Whether the context is full, or another limit of the session is reached: the episode is at its end."""
        return self.code in _LIMITS


_LIMITS = ("context_length_exceeded", "session_limit_reached", "max_length")


def _told(answer: Any) -> tuple[str, str]:
    """The code and the message of an error: OpenAI's, or ROLL's, which is a text with a `stop_reason` beside it."""
    try:
        body = answer.json()
        error = body["error"]
        if isinstance(error, str):
            return str(body.get("stop_reason") or ""), error
        return str(error.get("code") or ""), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", answer.text
