"""What an exception becomes as the `exit_reason` of its session: a text that a server takes, whatever was raised."""

from __future__ import annotations

import re

_MOST = 4000
"""Characters that are kept: the reason is in every list of sessions, and the exception itself goes to the caller."""
_KEYS = re.compile(r"(?<=/~)[^/\s'\"]+|(?<=~)[\w-]{22}(?![\w-])")
"""The key or the secret in a session's address, which HTTP clients quote in their errors."""


def exit_reason(error: BaseException) -> str:
    """Return the class and the message of `error`, without the keys of addresses in it.

    A long message keeps its beginning and its end, and what no database stores (NUL, lone surrogates) is escaped.
    """
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except Exception as failure:
        text = f"{kind}: its text cannot be made ({type(failure).__name__})"
    return storable(text)


def storable(text: str) -> str:
    """`text` as a server takes it: not too long, and without keys and what no database stores."""
    text = without_keys(text)
    if (extra := len(text) - _MOST) > 0:
        half = _MOST // 2
        text = f"{text[:half]} [... {extra} characters ...] {text[-half:]}"
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def without_keys(text: str) -> str:
    """`text` without the keys and secrets in addresses of sessions."""
    return _KEYS.sub("...", text)
