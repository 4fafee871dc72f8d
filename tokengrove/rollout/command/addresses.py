"""The addresses of a session for a command; in a container, the server may have another host name."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tokengrove.rollout.environment import Addressed


@dataclass(frozen=True, slots=True)
class Addresses:
    """The part of a session that a command gets."""

    base_url: str
    root_url: str
    api_key: str


def addresses_of(session: Addressed, server_url: str | None = None) -> Addresses:
    """The session's addresses; with `server_url`, it replaces the scheme, host and port of the server."""
    if server_url is None:
        return Addresses(session.base_url, session.root_url, session.api_key)
    start = server_url.rstrip("/")
    base, root = (f"{start}{urlsplit(url).path}" for url in (session.base_url, session.root_url))
    return Addresses(base, root, session.api_key)
