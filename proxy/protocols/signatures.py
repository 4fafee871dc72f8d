"""Signatures of reasoning: opaque texts that clients send back unchanged, from which the answer is found again."""

from __future__ import annotations

import base64
from typing import Any

_MARK = "tokengrove:"


def signature_of(interaction_id: str) -> str:
    """Return the signature of a thinking block. It contains the interaction id, and clients send it back unchanged."""
    return base64.b64encode(f"{_MARK}{interaction_id}".encode()).decode()


def origin_of(signature: Any) -> str | None:
    """Return the interaction id in a signature, or None if this server did not write it."""
    try:
        text = base64.b64decode(signature, validate=True).decode() if isinstance(signature, str) else ""
    except ValueError:
        return None
    return text.removeprefix(_MARK) if text.startswith(_MARK) else None
