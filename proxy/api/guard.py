"""Checks every request before its endpoint: pages of other sites must not call a server that requires no key.

On a server without an admin key, the name in `Host` is checked, requests from other origins (including other ports of
this machine) are refused unless they are allowed, and only this machine may manage engine servers. A server with keys
needs none of this, because a page knows no key; it checks `Host` only with `--allowed-hosts`. On both, pages of
`--allowed-origins` may read the answers.

A link on another site may open the page: that reveals nothing to the site, and the page cannot be framed.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.answers import identified
from proxy.api.headers import Headers, headers_of
from proxy.api.hosts import Hosts, host_name, is_address, is_loopback
from proxy.api.http import error_response
from proxy.api.origins import Origins, answer_preflight, is_preflight, shared_with
from proxy.settings import Settings
from proxy.telemetry.http_request import request_of
from tokengrove.errors import Forbidden, HostNotAllowed, OriginNotAllowed, brief

_CHECKED = frozenset({b"host", b"origin", b"sec-fetch-site"})
_WEB = re.compile("(https?)://(.*)")
_PORT = re.compile(r":([0-9]+)$")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_OWN_SITE = ("same-origin", "same-site", "none")
_PAGE = ("/", "/ui")
_FORWARDED = (b"x-forwarded-for", b"x-real-ip", b"forwarded")
_SERVERS = "/engine/servers"
_SHOWN = 100
_MOST_SEEN = 64


class Guard:
    """Checks requests to a server with these settings. Of several workers, only the first one checks a request."""

    def __init__(self, settings: Settings) -> None:
        self._open = settings.admin_key is None
        self._checks_hosts = self._open or settings.allowed_hosts is not None
        self.idle = not self._checks_hosts and settings.allowed_origins is None
        """Whether there is nothing to check."""
        self._hosts, self._origins = Hosts(settings), Origins(settings)
        self._public_url = (settings.public_url or "").lower()
        self._seen_hosts: set[bytes | None] = set()

    def admits(self, scope: Scope) -> bool:
        """Whether a request is certainly admitted and is shared with no page: what agents send, time and again.

        The others are checked by a call.
        """
        host: bytes | None = None
        for name, value in scope["headers"]:
            if name in _CHECKED:
                if name != b"host" or host is not None:
                    return False
                host = value
        return host in self._seen_hosts and not scope["path"].endswith(_SERVERS)

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted request to `app`; answer other requests with an error."""
        try:
            origin = self._admitted(scope)
        except Forbidden as error:
            await error_response(scope, error)(scope, receive, send)
            return
        if origin is None:
            await app(scope, receive, send)
        elif is_preflight(scope):
            await answer_preflight(scope, identified(scope, request_of(scope), shared_with(origin, send)))
        else:
            await app(scope, receive, shared_with(origin, send))

    def _admitted(self, scope: Scope) -> str | None:
        """The allowed origin of a request; None for other admitted requests. Raises Forbidden."""
        found = [(name, value) for name, value in scope["headers"] if name in _CHECKED]
        hosts = [value.decode("latin-1") for name, value in found if name == b"host"]
        if self._checks_hosts:
            self._check_host(hosts, scope)
        origins = [value.decode("latin-1") for name, value in found if name == b"origin"]
        allowed = origins[0] if len(origins) == 1 and origins[0] in self._origins else None
        if self._open:
            if allowed is None:
                for origin in origins:
                    self._check_origin(origin, hosts, scope)
                for name, value in found:
                    foreign = name == b"sec-fetch-site" and value.decode("latin-1") not in _OWN_SITE
                    if foreign and not _follows_link(scope):
                        raise OriginNotAllowed(_cross_site("of another site (Sec-Fetch-Site: cross-site)"))
            if scope["path"].endswith(_SERVERS):
                _check_nearby(scope, headers_of(scope))
        return allowed

    def _check_host(self, hosts: list[str], scope: Scope) -> None:
        if not hosts:
            return  # not a browser: a health check over HTTP/1.0, or a client in this process
        if len(hosts) == 1 and self._hosts.accepts(hosts[0]):
            if len(self._seen_hosts) < _MOST_SEEN:
                self._seen_hosts.add(hosts[0].encode("latin-1"))
            return
        if len(hosts) == 1 and _is_own(hosts[0], scope):
            return
        names = "localhost, 127.0.0.1, [::1], the host of --public-url and those of --allowed-hosts"
        if len(hosts) != 1:
            raise HostNotAllowed(f"a request needs one 'Host' header, and this one has {len(hosts)}; known are {names}")
        name = host_name(hosts[0]) or hosts[0]
        way_out = f"start it with --allowed-hosts {name[:_SHOWN]}"
        why = " because it has no admin key" if self._open else ""
        raise HostNotAllowed(
            f"this server may not be called under the host {brief(hosts[0])}{why}: it answers to {names}; {way_out}"
            + (", or with an admin key (TOKENGROVE_ADMIN_KEY)" if self._open else "")
        )

    def _check_origin(self, origin: str, hosts: list[str], scope: Scope) -> None:
        web = _WEB.fullmatch(origin.lower())
        if web is None or not (self._hosts.accepts(web[2]) or _is_own(web[2], scope)):
            raise OriginNotAllowed(_cross_site(f"of the origin {brief(origin)}"))
        if _port(web[2], web[1]) not in self._ports(web[1], host_name(web[2]), hosts, scope):
            raise OriginNotAllowed(_cross_site(f"of another port ({brief(origin)})"))

    def _ports(self, scheme: str, name: str | None, hosts: list[str], scope: Scope) -> set[int]:
        """The ports at which a page with this name belongs to this server: the ports under which it is called."""
        found = {_port(host, scheme) for host in hosts}
        if (server := scope.get("server")) is not None and server[1] is not None:
            found.add(server[1])
        if public := _WEB.fullmatch(self._public_url):
            found.add(_port(public[2].partition("/")[0], public[1]))
        if name is not None and name != "localhost" and not name.endswith(".localhost") and not is_loopback(name):
            found.add(_DEFAULT_PORTS[scheme])  # a gateway may rewrite `Host`
        return found


def _follows_link(scope: Scope) -> bool:
    """Whether a user opens the page as a top-level document."""
    if scope["path"] not in _PAGE or scope["method"] not in ("GET", "HEAD"):
        return False
    headers = headers_of(scope)
    return headers.get(b"sec-fetch-mode") == "navigate" and headers.get(b"sec-fetch-dest") == "document"


def _port(host: str, scheme: str) -> int:
    """The port in a `Host` or the rest of an origin."""
    found = _PORT.search(host)
    return int(found[1]) if found else _DEFAULT_PORTS[scheme]


def _cross_site(which: str) -> str:
    return (
        f"this server has no admin key, so pages {which} may not call it: name the origin in --allowed-origins "
        "(such as vscode-webview://* or https://app.example), or start the server with an admin key"
    )


def _is_own(host: str, scope: Scope) -> bool:
    """Whether `host` is the local address of the connection; in process, the host of the called URL."""
    server = scope.get("server")
    if server is None:
        return False
    own = str(server[0]).lower()
    return host_name(host) == (f"[{own}]" if ":" in own else own)


def _check_nearby(scope: Scope, headers: Headers) -> None:
    """Raise Forbidden for a client on another machine or behind a proxy, because this server would call its URLs."""
    client = scope.get("client")
    passed = [part for name in _FORWARDED for part in headers.get(name, "").split(",") if part]
    far = client is not None and is_address(client[0]) and not is_loopback(client[0])  # else in process or on Unix
    if not far and all(is_loopback(part.strip()) for part in passed):
        return
    raise Forbidden(
        f"{_SERVERS} needs the admin key from other machines, and this server has none: "
        "start it with TOKENGROVE_ADMIN_KEY, or send the request from the machine itself"
    )
