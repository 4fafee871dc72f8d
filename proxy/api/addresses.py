"""Under which URL a caller reaches this server: what it says itself counts only where it comes from a trusted proxy."""

from __future__ import annotations

import ipaddress
import re

from starlette.requests import Request

from proxy.settings import Settings

_HOST = re.compile(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?")
_PREFIX = re.compile(r"(/[\w.~:@+-]+)*/?")


class Addresses:
    """Makes root URLs: of `--public-url`, else of a trusted proxy's X-Forwarded-* headers, else of the request."""

    def __init__(self, settings: Settings) -> None:
        self._public_url = settings.public_url
        names = [part.strip() for part in (settings.forwarded_allow_ips or "").split(",") if part.strip()]
        self._everybody = "*" in names
        self._trusted = [ipaddress.ip_network(name, strict=False) for name in names if name != "*"]

    def root_url(self, request: Request) -> str:
        """The URL of this server's root, without a slash at its end."""
        if self._public_url:
            return self._public_url.rstrip("/")
        return (self._forwarded(request) or str(request.base_url)).rstrip("/")

    def _forwarded(self, request: Request) -> str | None:
        """What the proxy nearest to the client said, as far as it makes sense."""
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
