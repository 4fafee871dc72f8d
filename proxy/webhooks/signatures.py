"""Signatures as Standard Webhooks describes them (https://www.standardwebhooks.com), version 1.

The HMAC-SHA256 covers the id, the time and the body, so that an old request cannot be sent again later.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence


def signed_headers(event_id: str, timestamp: int, body: str, secrets: Sequence[bytes]) -> Mapping[str, str]:
    """The headers of a delivery: id, time in Unix seconds, and one signature by each secret."""
    content = f"{event_id}.{timestamp}.{body}".encode()
    signatures = (hmac.new(secret, content, hashlib.sha256).digest() for secret in secrets)
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(each).decode()}" for each in signatures),
    }
