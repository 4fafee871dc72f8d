"""The names under which a server may be called: a page of another site reaches it only under a name of that site.

A page whose name was made to resolve to this machine (DNS rebinding) is of the same origin as the server for a browser,
so nothing but the header `Host` tells the two apart. An IP address in `Host` was resolved by nobody, but 0.0.0.0 is an
address of this machine that browsers let pages of other sites call, so only addresses of loopback are accepted.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from urllib.parse import urlsplit

from proxy.settings import Settings, listed

# A name, an IPv4 address or an IPv6 address in brackets; a name may end with the dot of the root. Then the port.
_HOST = re.compile(r"([a-z0-9_-][a-z0-9._-]*?|\[[0-9a-f:.]+\])\.?(?::[0-9]{0,5})?")
_REMEMBERED = 64


class Hosts:
    """Loopback names and addresses, the host of `--public-url`, and those of `--allowed-hosts`; ports do not count."""

    def __init__(self, settings: Settings) -> None:
        allowed = [name.lower() for name in listed(settings.allowed_hosts)]
        public = urlsplit(settings.public_url or "").hostname
        self._names = {name for name in allowed if not name.startswith("*")}
        if public is not None:
            self._names.add(f"[{public}]" if ":" in public else public)
        self._suffixes = (".localhost", *(name[1:] for name in allowed if name.startswith("*")))
        self.accepts = lru_cache(_REMEMBERED)(self._accepts)
        """Whether a server with these settings may be called under a `Host` or the rest of an origin."""

    def _accepts(self, text: str) -> bool:
        name = host_name(text)
        return name is not None and (
            name in self._names or name == "localhost" or name.endswith(self._suffixes) or is_loopback(name)
        )


def host_name(text: str) -> str | None:
    """The name or address in a `Host`, in lower case, without port and last dot; None if `text` is no host."""
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
    """Whether `address` is one of loopback, in the usual notation: browsers send no other. IPv6 may have brackets."""
    try:
        parsed = ipaddress.ip_address(address.strip("[]") if ":" in address else address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
