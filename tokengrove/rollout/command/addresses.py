"""The addresses of a session as a command sees them; in a container, the server may have another name."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tokengrove.rollout.environment import Addressed


@dataclass(frozen=True, slots=True)
class Addresses:
    """What a command gets of its session."""

    base_url: str
    root_url: str
    api_key: str


def addresses_of(session: Addressed, server_url: str | None = None) -> Addresses:
    """The session's addresses, on `server_url` in place of the server's own address if it is given."""
    if server_url is None:
        return Addresses(session.base_url, session.root_url, session.api_key)
    start = server_url.rstrip("/")
    base, root = (f"{start}{urlsplit(url).path}" for url in (session.base_url, session.root_url))
    return Addresses(base, root, session.api_key)
