"""Web origins that may call the server from a browser or a webview, and the CORS headers for them."""

from __future__ import annotations

import re

from starlette.types import Message, Scope, Send

from proxy.api.headers import headers_of
from proxy.settings import Settings, listed

_PREFLIGHT_S = 600


class Origins:
    """The origins of `--allowed-origins`. `*` matches any host, or any beginning of a host name."""

    def __init__(self, settings: Settings) -> None:
        patterns = (re.escape(text.lower()).replace(r"\*", "[^/]+") for text in listed(settings.allowed_origins))
        self._pattern = re.compile("|".join(patterns) or r"(?!)")

    def __contains__(self, origin: str) -> bool:
        return self._pattern.fullmatch(origin.lower()) is not None


def is_preflight(scope: Scope) -> bool:
    """Whether a request is a CORS preflight."""
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers_of(scope)


async def answer_preflight(scope: Scope, send: Send) -> None:
    """Permit the announced request: every method, and the headers that it names."""
    asked = headers_of(scope)
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", "").encode("latin-1")),
        (b"access-control-max-age", b"%d" % _PREFLIGHT_S),
    ]
    if b"access-control-request-private-network" in asked:
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def shared_with(origin: str, send: Send) -> Send:
    """Wrap `send` so that pages of `origin` may read the answer."""
    shared = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"origin"),
    ]

    async def send_shared(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *shared]}
        await send(message)

    return send_shared
