"""Ids of output items, and our `encrypted_content`. Both contain the id of the interaction that the item belongs to.

The interaction `resp_<hex>` has the items `rs_<hex>` (reasoning), `msg_<hex>` (message) and `fc_<hex>_<k>` (call `k`,
from 0; calls of tools that OpenAI defines begin in their own way). Further reasoning or message items get `_<number>`
from 1. `encrypted_content` is encoded, not encrypted: it holds only what the reply already contains.
"""

from __future__ import annotations

import base64
import re

RESPONSE_PREFIX = "resp_"
MESSAGE_PREFIX = "msg_"
_ITEM_ID = re.compile(r"(?:rs|msg|fc|sh|lsh|apc|cu|tsc|ctc)_([0-9a-f]{32})(?:_[0-9]+)?")
_MARK = "tokengrove:"


def reasoning_id(response_id: str, number: int) -> str:
    """Return the id of reasoning item `number`, counted from 0."""
    return _numbered("rs_", response_id, number)


def message_id(response_id: str, number: int) -> str:
    """Return the id of message item `number`, counted from 0."""
    return _numbered(MESSAGE_PREFIX, response_id, number)


def call_item_id(response_id: str, number: int, prefix: str = "fc") -> str:
    """Return the id of call item `number`, counted from 0."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}_{number}"


def _numbered(prefix: str, response_id: str, number: int) -> str:
    return prefix + response_id.removeprefix(RESPONSE_PREFIX) + (f"_{number}" if number else "")


def origin_of(item_id: str) -> str | None:
    """Return the id of the response that the item belongs to, or None if this server did not make the id."""
    match = _ITEM_ID.fullmatch(item_id)
    return RESPONSE_PREFIX + match[1] if match else None


def encrypt(response_id: str, reasoning: str) -> str:
    """Return `encrypted_content`: the response id and the reasoning, in base64."""
    return base64.b64encode(f"{_MARK}{response_id}:{reasoning}".encode()).decode()


def read_encrypted(text: str) -> tuple[str | None, str]:
    """Return the response id and the reasoning in `encrypted_content`, or (None, "") if it is not this server's."""
    try:
        plain = base64.b64decode(text, validate=True).decode()
    except ValueError:
        return None, ""
    if not plain.startswith(_MARK):
        return None, ""
    response_id, _, reasoning = plain.removeprefix(_MARK).partition(":")
    return response_id or None, reasoning
