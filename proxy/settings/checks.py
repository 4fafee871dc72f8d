"""Checks of one value each. Each raises ConfigurationError that names the flag and the way out."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from proxy.errors import ConfigurationError

HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
# `https://*` would be every site. Sandboxed pages of every site have the origin `null`, which is no URL.
ORIGIN = re.compile(r"(?!https?://\*$)[a-z][a-z0-9+.-]*://(\*|(\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def listed(text: str | None) -> list[str]:
    """The parts of a setting that are separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def check_admin_key(key: str | None) -> None:
    if key is not None and not all(part.strip() == part and part for part in key.split(",")):
        raise ConfigurationError(
            "--admin-key is empty or has white space around a key; separate several keys by commas without spaces"
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
    try:
        known = url is None or urlsplit(url).hostname
    except ValueError:
        known = None
    if not known:
        raise ConfigurationError(f"--public-url {url!r} is not a URL such as https://rollouts.example.org")


def check_listed(flag: str, text: str | None, form: re.Pattern[str], meaning: str) -> None:
    """Raise ConfigurationError for the first part of a list that does not have the form, or if there is none."""
    parts = listed(text)
    wrong = next((part for part in parts if not form.fullmatch(part.lower())), None if parts or text is None else text)
    if wrong is not None:
        raise ConfigurationError(f"{flag} {wrong!r} is not {meaning}; separate several by commas")


def check_choice(flag: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{flag} {value} must be one of {', '.join(c for c in choices if c)}")
