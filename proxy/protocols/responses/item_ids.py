"""Ids of output items, and our `encrypted_content`: each tells of which interaction its item is.

The interaction `resp_<hex>` has the items `rs_<hex>`, `msg_<hex>` and `fc_<hex>_<k>`; further ones of a kind are
numbered. Encrypted content is opaque to clients only; it holds nothing that the reply does not say.
"""

from __future__ import annotations

import base64
import re

RESPONSE_PREFIX = "resp_"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_[0-9]+)?")
_MARK = "tokengrove:"


def reasoning_id(response_id: str, number: int) -> str:
    return _numbered("rs_", response_id, number)


def message_id(response_id: str, number: int) -> str:
    return _numbered("msg_", response_id, number)


def call_item_id(response_id: str, number: int) -> str:
    return f"fc_{response_id.removeprefix(RESPONSE_PREFIX)}_{number}"


def _numbered(prefix: str, response_id: str, number: int) -> str:
    return prefix + response_id.removeprefix(RESPONSE_PREFIX) + (f"_{number}" if number else "")


def origin_of(item_id: str) -> str | None:
    """The response that an item of this id is from; None for ids that are not ours."""
    match = _ITEM_ID.fullmatch(item_id)
    return RESPONSE_PREFIX + match[1] if match else None


def encrypt(response_id: str, reasoning: str) -> str:
    """Opaque text that brings back the reasoning and where it is from."""
    return base64.b64encode(f"{_MARK}{response_id}:{reasoning}".encode()).decode()


def read_encrypted(text: str) -> tuple[str | None, str]:
    """The response and the reasoning in our encrypted content; (None, "") for that of others."""
    try:
        plain = base64.b64decode(text, validate=True).decode()
    except ValueError:
        return None, ""
    if not plain.startswith(_MARK):
        return None, ""
    response_id, _, reasoning = plain.removeprefix(_MARK).partition(":")
    return response_id or None, reasoning
