"""The names under which a server may be called. A page of another site reaches it only under a name of that site.

If the name of a page resolves to this machine (DNS rebinding), a browser treats the page and the server as the same
origin, and only the `Host` header distinguishes them. An IP address in `Host` needs no resolution. But browsers let
pages of other sites call 0.0.0.0, which is an address of this machine, so only loopback addresses are accepted.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from urllib.parse import urlsplit

from proxy.settings import Settings, listed

# A name (perhaps with a final dot), an IPv4 address or an IPv6 address in brackets, followed by the port.
_HOST = re.compile(r"([a-z0-9_-][a-z0-9._-]*?|\[[0-9a-f:.]+\])\.?(?::[0-9]{0,5})?")
_REMEMBERED = 64


class Hosts:
    """Loopback names and addresses, the host of `--public-url`, and `--allowed-hosts`. Ports are ignored."""

    def __init__(self, settings: Settings) -> None:
        allowed = [name.lower() for name in listed(settings.allowed_hosts)]
        public = urlsplit(settings.public_url or "").hostname
        self._names = {name for name in allowed if not name.startswith("*")}
        if public is not None:
            self._names.add(f"[{public}]" if ":" in public else public)
        self._suffixes = (".localhost", *(name[1:] for name in allowed if name.startswith("*")))
        self.accepts = lru_cache(_REMEMBERED)(self._accepts)
        """Whether the server may be called under a `Host`, or the part of an origin after its scheme."""

    def _accepts(self, text: str) -> bool:
        name = host_name(text)
        return name is not None and (
            name in self._names or name == "localhost" or name.endswith(self._suffixes) or is_loopback(name)
        )


def host_name(text: str) -> str | None:
    """The name or address in a `Host`, in lower case, without port and final dot; None if `text` is not a host."""
    found = _HOST.fullmatch(text.lower())
    return None if found is None else found[1]


def is_address(text: str) -> bool:
    """Whether `text` is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether `address` is a loopback address in the usual notation, the only one that browsers send.

    IPv6 addresses may have brackets.
    """
    try:
        parsed = ipaddress.ip_address(address.strip("[]") if ":" in address else address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
