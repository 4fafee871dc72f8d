"""Which hosts a URL may name that was given over HTTP. URLs of the configuration are not checked."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from proxy.images.fetch import is_listed
from tokengrove.errors import InvalidRequest

_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_MOST_LENGTH = 2000


def check_url(url: str, allowed_hosts: tuple[str, ...], name: str = "url") -> None:
    """Raise InvalidRequest for a URL of an external model that may not be used.

    `allowed_hosts`: those of `--model-hosts`, in lower case and without brackets: names, and suffixes as `*.SUFFIX`.
    Without any, no URL may be used. A listed host may have any address. `name`: the path of the field.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _refused(name, "is no valid URL") from None
    if not (url.isascii() and url.isprintable()) or " " in url or len(url) > _MOST_LENGTH:
        raise _refused(name, "is no valid URL")
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or port == 0:
        raise _refused(name, "is no http(s) URL of a host")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise _refused(name, "has a user name, a password, a query or a fragment; give a URL without")
    if not is_listed(host, allowed_hosts):
        raise _refused(name, "is at a host that --model-hosts does not list")


def _refused(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"'{name}' {reason}", param=name)
