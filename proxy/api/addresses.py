"""The URL under which a client reaches this server, and the client's address.

Forwarded headers count only if a trusted proxy sent them.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.requests import Request
from starlette.types import Scope

from proxy.api.headers import Headers, headers_of, key_in
from proxy.resources.senders import Sender, host_of
from proxy.sessions.keys import session_of_key
from proxy.settings import Settings

_IN_PROCESS = "tokengrove.in_process"
"""The ASGI extension that the client in this process announces."""

_HOST = re.compile(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?")
_PREFIX = re.compile(r"(/[\w.~:@+-]+)*/?")


class Addresses:
    """Root URLs, from `--public-url`, else from the X-Forwarded-* headers of a trusted proxy, else from the request.

    A client in this process gets the address that it uses, because it reaches no other.
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

    def client(self, scope: Scope) -> str:
        """The address that a request comes from: behind trusted proxies, the address that the first of them saw."""
        found = str((scope.get("client") or ("",))[0])
        if not (self._trusted or self._everybody):
            return found
        named = [part.strip() for part in headers_of(scope).get(b"x-forwarded-for", "").split(",") if part.strip()]
        while named and self._trusted_address(found):
            found = named.pop()
            if self._everybody:
                break
        return found

    def host(self, scope: Scope) -> str:
        """The host that a request comes from."""
        return host_of(self.client(scope))

    def sender(self, scope: Scope, headers: Headers) -> Sender:
        """The sender of a request, as far as it is known before its session is found."""
        behind_proxies = self._everybody or self._trusted
        host = self.host(scope) if behind_proxies else host_of(str((scope.get("client") or ("",))[0]))
        path: str | None = scope.get("path_params", {}).get("session")
        if path:  # a secret or an agent's name does not change the sender
            return Sender(host, path.partition("~")[0] or path.partition("@")[0])
        key = key_in(headers)
        return Sender(host, session_of_key(key) if key else "")

    def _forwarded(self, request: Request) -> str | None:
        """The URL from X-Forwarded-* headers, ignoring malformed ones; None if no trusted proxy sent the request."""
        if not self._trusts(request):
            return None
        scheme, host, prefix = (_first(request, f"x-forwarded-{name}") for name in ("proto", "host", "prefix"))
        if scheme not in ("http", "https"):
            scheme = request.url.scheme
        if not _HOST.fullmatch(host):
            host = request.url.netloc
        return f"{scheme}://{host}{prefix if _PREFIX.fullmatch(prefix) else ''}"

    def _trusts(self, request: Request) -> bool:
        return self._trusted_address("" if request.client is None else request.client.host)

    def _trusted_address(self, text: str) -> bool:
        if self._everybody:
            return True
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        return any(address in network for network in self._trusted)


def _first(request: Request, name: str) -> str:
    return request.headers.get(name, "").split(",")[0].strip()
