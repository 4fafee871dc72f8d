"""The URL under which agents reach this server, and the address of a client.

Forwarded headers count only if a trusted proxy sent them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Scope

from proxy.api.headers import Headers, headers_of, key_in
from proxy.resources.senders import Sender, host_of
from proxy.sessions.keys import session_of_key
from proxy.settings import Settings

_IN_PROCESS = "tokengrove.in_process"
"""The ASGI extension that the client in this process announces."""

_HOST = re.compile(r"[\w.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?")
_ALL = ("0.0.0.0", "::")
_PREFIX = re.compile(r"(/[\w.~:@+-]+)*/?")


class Addresses:
    """Root URLs: of the tunnel (`--expose`), else `--public-url`, else of the listener for agents, else of the request.

    The URL of a request is that of its X-Forwarded-* headers if a trusted proxy sent them. A client in this process
    gets the address that it uses. `agent_port`: the port of the listener for agents, once it is bound. `exposed`:
    returns the URL of the tunnel.
    """

    agent_port: int | None = None
    exposed: Callable[[], str] | None = None

    def __init__(self, settings: Settings) -> None:
        self._public_url, self._agents = settings.public_url, settings.agent_address
        names = [part.strip() for part in (settings.forwarded_allow_ips or "").split(",") if part.strip()]
        self._everybody = "*" in names
        self._trusted = [ipaddress.ip_network(name, strict=False) for name in names if name != "*"]

    def root_url(self, request: Request) -> str:
        """The URL of this server's root for agents, without a trailing slash. Raises TunnelUnavailable.

        With a listener for agents on all addresses of the machine, it has the host of the request.
        """
        url = None if _IN_PROCESS in request.scope.get("extensions", ()) else self._of_agents(request)
        return (url or self._forwarded(request) or str(request.base_url)).rstrip("/")

    def _of_agents(self, request: Request) -> str | None:
        """The URL that all agents use; None if each uses that of its request."""
        if self.exposed is not None:
            return self.exposed()
        if self._public_url or self._agents is None or self.agent_port is None:
            return self._public_url
        host = self._agents[0]
        if host in _ALL:
            host = request.url.hostname or host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.agent_port}"

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
