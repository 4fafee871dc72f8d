"""Tells addresses that lead only to this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Whether a server that listens on `host` is reached from this machine only."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is this machine itself, so that other machines do not reach the server."""
    host = urlsplit(url).hostname or ""
    address = _address(host)
    return is_loopback_host(host) or (address is not None and address.is_unspecified)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
