"""The `exit_reason` of a session after an exception: a text that the server accepts, whatever was raised."""

from __future__ import annotations

import re

_MOST = 4000
"""Characters to keep: the reason is in every list of sessions, and the caller gets the exception itself."""
_KEYS = re.compile(r"(?<=/~)[^/\s'\"]+|(?<=~)[\w-]{22}(?![\w-])")
"""The key or the secret in a session's address, which HTTP clients quote in their errors."""


def exit_reason(error: BaseException) -> str:
    """Return the class and the message of `error`, without the keys in addresses.

    A long message keeps its beginning and its end. Characters that databases cannot store (NUL, lone surrogates) are
    escaped.
    """
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except Exception as failure:
        text = f"{kind}: its text cannot be made ({type(failure).__name__})"
    return storable(text)


def storable(text: str) -> str:
    """`text` in a form that the server accepts: shortened, without keys, and with NUL and lone surrogates escaped."""
    text = without_keys(text)
    if (extra := len(text) - _MOST) > 0:
        half = _MOST // 2
        text = f"{text[:half]} [... {extra} characters ...] {text[-half:]}"
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def without_keys(text: str) -> str:
    """`text` without the keys and secrets in session addresses."""
    return _KEYS.sub("...", text)
