"""The URL under which a client reaches this server. Forwarded headers count only if a trusted proxy sent them."""

from __future__ import annotations

import ipaddress
import re

from starlette.requests import Request

from proxy.settings import Settings

_IN_PROCESS = "tokengrove.in_process"
"""The extension of ASGI that the client in this process announces."""

_HOST = re.compile(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?")
_PREFIX = re.compile(r"(/[\w.~:@+-]+)*/?")


class Addresses:
    """Root URLs, from `--public-url`, else from the X-Forwarded-* headers of a trusted proxy, else from the request.

    A client in this process gets its own address: it reaches no other one.
    """

    def __init__(self, settings: Settings) -> None:
        self._public_url = settings.public_url
        names = [part.strip() for part in (settings.forwarded_allow_ips or "").split(",") if part.strip()]
        self._everybody = "*" in names
        self._trusted = [ipaddress.ip_network(name, strict=False) for name in names if name != "*"]

    def root_url(self, request: Request) -> str:
        """The URL of this server's root, without a trailing slash."""
        if self._public_url and _IN_PROCESS not in request.scope.get("extensions", ()):
            return self._public_url.rstrip("/")
        return (self._forwarded(request) or str(request.base_url)).rstrip("/")

    def _forwarded(self, request: Request) -> str | None:
        """The URL by X-Forwarded-* headers, malformed ones ignored; None if no trusted proxy sent the request."""
        if not self._trusts(request):
            return None
        scheme, host, prefix = (_first(request, f"x-forwarded-{name}") for name in ("proto", "host", "prefix"))
        if scheme not in ("http", "https"):
            scheme = request.url.scheme
        if not _HOST.fullmatch(host):
            host = request.url.netloc
        return f"{scheme}://{host}{prefix if _PREFIX.fullmatch(prefix) else ''}"

    def _trusts(self, request: Request) -> bool:
        if self._everybody or request.client is None:
            return self._everybody
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        return any(address in network for network in self._trusted)


def _first(request: Request, name: str) -> str:
    return request.headers.get(name, "").split(",")[0].strip()
