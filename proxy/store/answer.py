"""The answer of a control call, which is stored with what the call changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call was answered. `call_hash`: of its Idempotency-Key; `request_hash`: of what it asked for."""

    call_hash: str
    request_hash: str
    answer: bytes


Noted = Callable[[Any], Answer]
"""Makes the answer of a call of the result of its change. It may run in another thread."""
