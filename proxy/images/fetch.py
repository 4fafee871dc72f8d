"""Fetches images from http(s) URLs, for servers that are allowed to.

A client must not reach through the server what it cannot reach itself. Therefore each name is resolved first, its
addresses are checked, and the connection goes to a checked address; the same applies to every redirect. Nothing of the
server is sent: no cookies, no credentials, no proxy settings. Bytes and seconds are limited.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    import httpx

_MOST_REDIRECTS = 3
MOST_AT_ONCE = 16
_MOST_LENGTH = 8000
_SCHEMES = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {
    "accept": "image/png,image/jpeg,image/webp,image/gif",
    "accept-encoding": "identity",
    "user-agent": "tokengrove",
}


class ImageFetcher:
    """Fetches images over its own connections. `hosts`: allowed names, as NAME or *.SUFFIX; empty: all names that have
    only public addresses. A host that is listed by its own name may have any address."""

    def __init__(self, hosts: tuple[str, ...], timeout_s: float, most_bytes: int) -> None:
        self._hosts, self._names = hosts, frozenset(host for host in hosts if not host.startswith("*."))
        self._timeout_s, self._most_bytes = timeout_s, most_bytes
        self._room = asyncio.Semaphore(MOST_AT_ONCE)

    async def __call__(self, url: str, name: str) -> bytes:
        """Return the bytes at a URL. Raises InvalidRequest naming the field, without any text from the host."""
        import httpx

        try:
            async with self._room:  # time spent waiting for other fetches does not count
                async with asyncio.timeout(self._timeout_s):
                    return await self._follow(url, name)
        except TimeoutError:
            reason = f"was not fetched within {self._timeout_s:g} seconds (--image-url-timeout-s)"
            raise _refused(name, reason) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
            raise _refused(name, "cannot be fetched: its host does not answer as it should") from None

    async def _follow(self, url: str, name: str) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            target = self._checked(url, name)
            found = await self._get(target, await self._address(target, name), name)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _refused(name, f"redirects more than {_MOST_REDIRECTS} times")

    def _checked(self, url: str, name: str) -> SplitResult:
        """Return the parts of a URL that may be fetched. Raises InvalidRequest for any other URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _refused(name, "is no valid URL") from None
        if len(url) > _MOST_LENGTH or parts.scheme not in _SCHEMES or not parts.hostname or port == 0:
            raise _refused(name, "is no http(s) URL of a host")
        if parts.username is not None or parts.password is not None:
            raise _refused(name, "has a user name or password; give a URL without")
        if self._hosts and not is_listed(parts.hostname, self._hosts):
            raise _refused(name, "is at a host that --image-hosts does not list")
        return parts

    async def _address(self, parts: SplitResult, name: str) -> str:
        """Return an address of the host to which a connection is allowed."""
        host = str(parts.hostname)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, parts.port or _SCHEMES[parts.scheme], type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _refused(name, "is at a host that cannot be found") from None
        addresses = [str(entry[4][0]) for entry in found]
        if host not in self._names and not all(map(is_public, addresses)):
            raise _refused(name, "is at an address that is not public; list its host in --image-hosts to allow it")
        return addresses[0]

    async def _get(self, parts: SplitResult, address: str, name: str) -> bytes | str:
        """Return the body, or the location of a redirect."""
        import httpx

        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
        headers = {**_HEADERS, "host": host if parts.port is None else f"{host}:{parts.port}"}
        url = httpx.URL(scheme=parts.scheme, host=address, port=parts.port, raw_path=_raw_path(parts))
        # The certificate must match the name, although the connection goes to the address.
        sni = {"sni_hostname": str(parts.hostname)}
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._timeout_s) as client,
            client.stream("GET", url, headers=headers, extensions=sni) as answer,
        ):
            if answer.status_code in _REDIRECTS and "location" in answer.headers:
                return str(answer.headers["location"])
            if answer.status_code != 200:
                raise _refused(name, f"cannot be fetched: its host answers with status {answer.status_code}")
            return await self._body(answer, name)

    async def _body(self, answer: httpx.Response, name: str) -> bytes:
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise _refused(name, "is answered in a content encoding that was not asked for")
        body = bytearray()
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > self._most_bytes:
                raise _refused(name, f"has more than {self._most_bytes} bytes (--max-image-bytes)")
        return bytes(body)


def is_listed(host: str, hosts: tuple[str, ...]) -> bool:
    """Whether a list of hosts, each NAME or *.SUFFIX, has a host."""
    return any(host.endswith(entry[1:]) if entry.startswith("*.") else host == entry for entry in hosts)


def is_public(address: str) -> bool:
    """Whether an address belongs to a host of the public Internet. IPv6 forms of IPv4 addresses are checked as IPv4."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        within = found.ipv4_mapped or found.sixtofour or _nat64(found)
        if found.teredo is not None or found.is_site_local:
            return False
        if within is not None:
            return is_public(str(within))
    return found.is_global and not found.is_multicast and not found.is_reserved


def _nat64(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    within = address in ipaddress.IPv6Network("64:ff9b::/96")
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if within else None


def _raw_path(parts: SplitResult) -> bytes:
    """The path and query of a request line, as the client wrote them."""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return path.encode("ascii")


def _refused(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"'{name}' {reason}", param=name)
