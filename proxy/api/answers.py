"""The request id of every answer, in the header that the SDKs of its API read."""

from __future__ import annotations

import re

from starlette.types import Message, Scope, Send

from proxy.telemetry.http_request import HttpRequest

_NAMES = (b"x-request-id", b"request-id")
_GOOGLE = re.compile(
    r"(?!/rl/).*(?:/v1(?:beta|alpha)/|/models/.+:(?:generateContent|streamGenerateContent|countTokens)$)"
)


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API, even if it has no endpoint here (`batches`)."""
    _, version, rest = path.rpartition("/v1/")
    return path.endswith(("/messages", "/messages/count_tokens")) or (bool(version) and rest.startswith("messages/"))


def is_google_path(path: str) -> bool:
    """Whether a path belongs to Google's API, even if it has no endpoint here (`embedContent`)."""
    return _GOOGLE.match(path) is not None


def id_header(path: str) -> str:
    """The header of the request id: `request-id` for Anthropic's Messages API, else `x-request-id`."""
    return "request-id" if is_messages_path(path) else "x-request-id"


def identified(scope: Scope, request: HttpRequest, send: Send) -> Send:
    """Wrap `send` to record the status, and to add the request id header to an answer without it."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            request.status = message["status"]
            if not any(name in _NAMES for name, _ in message["headers"]):
                header = (id_header(scope["path"]).encode(), request.name().encode())
                message["headers"] = [*message["headers"], header]
        await send(message)

    return answer
