"""The answer to a control call, which is stored with the changes of the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call. `call_hash`: the hash of its Idempotency-Key; `request_hash`: the hash of its request."""

    call_hash: str
    request_hash: str
    answer: bytes


Noted = Callable[[Any], Answer]
"""Makes the answer to a call from the result of its change. It may run in another thread."""
