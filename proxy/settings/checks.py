"""Checks of single values. Each raises a ConfigurationError that names the flag and the way out."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from tokengrove.errors import ConfigurationError

HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
# `https://*` would match every site. Sandboxed pages of every site have the origin `null`, which is not a URL.
ORIGIN = re.compile(r"(?!https?://\*$)[a-z][a-z0-9+.-]*://(\*|(\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")


def listed(text: str | None) -> list[str]:
    """The comma-separated parts of a setting."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def check_key(flag: str, key: str | None) -> None:
    if key is not None and not all(part.strip() == part and part for part in key.split(",")):
        raise ConfigurationError(
            f"{flag} is empty or has white space around a key; separate several keys by commas without spaces"
        )


def check_proxies(text: str | None) -> None:
    for name in (text or "").split(","):
        try:
            if name.strip() not in ("", "*"):
                ipaddress.ip_network(name.strip(), strict=False)
        except ValueError:
            raise ConfigurationError(
                f"--forwarded-allow-ips {name.strip()!r} is not an IP address, a network such as 10.0.0.0/8, or *"
            ) from None


def check_public_url(url: str | None) -> None:
    """Check the public URL. It may have a path, since a gateway may serve this server under one."""
    if url is not None and not _is_http_url(url, without="?# "):
        raise ConfigurationError(
            f"--public-url {url!r} is not a URL such as https://rollouts.example.org or https://example.org/a: it "
            "begins with http:// or https:// and a host, and has no user, query or fragment"
        )


def _is_http_url(url: str, without: str) -> bool:
    """Whether a URL has a host, no user, and none of these characters."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False
    return bool(good) and set(without).isdisjoint(url)


def check_host(host: str, flag: str = "--host", port: str = "--port") -> None:
    """Check an address to listen on. `port`: the flag of its port."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host):
            raise ConfigurationError(
                f"{flag} {host!r} is neither an IP address nor a host name; the port has a flag of its own, {port}"
            ) from None


def check_expose(command: str) -> None:
    """Check the tunnel of `--expose`: a known name, or a command that is given its port."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigurationError(f"--expose {command!r} is not a command: {error}") from None
    if words != ["cloudflared"] and "{port}" not in command:
        raise ConfigurationError(
            f"--expose {command!r} is neither cloudflared nor a command with {{port}}, such as "
            "'ssh -R 80:localhost:{port} nokey@localhost.run'"
        )


def check_text(flag: str, text: str) -> None:
    if not text.strip():
        raise ConfigurationError(f"{flag} is empty; give a value, or leave it out for the default")


def check_listed(flag: str, text: str | None, form: re.Pattern[str], meaning: str) -> None:
    """Raise ConfigurationError for the first part of a list that does not match `form`, or for an empty list."""
    parts = listed(text)
    wrong = next((part for part in parts if not form.fullmatch(part.lower())), None if parts or text is None else text)
    if wrong is not None:
        raise ConfigurationError(f"{flag} {wrong!r} is not {meaning}; separate several by commas")


def read_webhook_secret(text: str) -> bytes:
    """The bytes of a secret as Standard Webhooks writes it. Raises ConfigurationError, which does not quote it."""
    try:
        secret = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith("whsec_") or not 24 <= len(secret) <= 64:
        raise ConfigurationError(
            "--webhook-secret is not whsec_ followed by the base64 of 24 to 64 bytes; make one with "
            "`echo whsec_$(openssl rand -base64 32)`"
        )
    return secret


def check_webhooks(urls: Sequence[str], secret: str | None) -> None:
    """Check the receivers of webhooks and the secret that signs what they get."""
    for url in urls:
        if not _is_http_url(url, without="# "):
            raise ConfigurationError(
                f"--webhook {url!r} is not a URL such as https://example.org/events: it begins with http:// or "
                "https:// and a host, and has no user and no fragment"
            )
    if len(set(urls)) < len(urls):
        raise ConfigurationError("--webhook has a URL twice; leave one out")
    if urls and secret is None:
        raise ConfigurationError("--webhook needs TOKENGROVE_WEBHOOK_SECRET (or --webhook-secret), which signs events")
    if secret is not None and not urls:
        raise ConfigurationError("--webhook-secret has no effect without --webhook; add one, or leave this out")
    for each in listed(secret):
        read_webhook_secret(each)
